"""Sparse pre-training in whole runs: the mask holds on every layout, and what is fine-tuned moves all weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.optimizer.static_mask import StaticMask
from gossamer.run.checkpoint import read_model
from gossamer.store.checkpoint import open_checkpoint
from gossamer.store.start_folder import StartContent, start_state, write_start
from pool import Pool
from run.jobs import Causal, Small
from run.test_start_folder import STEPS, model, run

RULE = StaticMask(sparsity=0.5)
OPTIMIZER = {"static_mask": {"inner": {"adamw": {"lr": 1e-2}}, "sparsity": 0.5}}
EXCHANGE = {"static_mask": {"sparsity": 0.5}}


def sections(exchange: Any = "dense", **plan: Any) -> dict[str, dict[str, Any]]:
    return {"plan": {"exchange": exchange, **plan}, "train": {"optimizer": OPTIMIZER, "max_grad_norm": 0.1}}


def zeros_are_exact(module: torch.nn.Module) -> bool:
    """Whether the zeros of the model's matrices are those of the masks."""
    found = []
    for name, param in module.named_parameters():
        shape = tuple(param.shape)
        if RULE.mask.covers(name, shape):
            found.append(torch.equal(param != 0, RULE.mask.kept(name, shape, param.device)))
    return len(found) == 4 and all(found)


def trained(
    pool: Pool, folder: Path, ranks: int, given: dict[str, dict[str, Any]], **more: Any
) -> list[dict[str, Any]]:
    return pool.run(
        "run.jobs:train", ranks, folder=str(folder), sections=given, words=False, **{"values": True, **more}
    )


def test_the_masked_exchange_trains_as_dense_does_for_fewer_bytes(pool: Pool, tmp_path: Path) -> None:
    """Clipping included, which counts masked gradients on both ways; bit for bit on two ranks."""
    dense = trained(pool, tmp_path / "dense", 2, sections())
    masked = trained(pool, tmp_path / "masked", 2, sections(EXCHANGE))
    assert dense[0]["values"] == masked[0]["values"] == masked[1]["values"]
    for folder in ("dense", "masked"):
        module = Small(0.0)
        read_model(module, tmp_path / folder / "run" / "checkpoints")
        assert zeros_are_exact(module)


@pytest.mark.parametrize("sharding", [pytest.param("zero1", marks=pytest.mark.nightly), "zero2", "zero3"])
def test_sharded_states_hold_the_same_mask(pool: Pool, tmp_path: Path, sharding: str) -> None:
    whole = trained(pool, tmp_path / "none", 3, sections())
    for name, exchange in {"dense": "dense", "masked": EXCHANGE}.items():
        found = trained(pool, tmp_path / name, 3, sections(exchange, sharding=sharding))
        torch.testing.assert_close(torch.tensor(found[0]["values"]), torch.tensor(whole[0]["values"]))
        assert [x == 0 for x in found[0]["values"]] == [x == 0 for x in whole[0]["values"]]


def test_a_run_resumes_on_other_ranks_with_its_mask(pool: Pool, tmp_path: Path) -> None:
    whole = trained(pool, tmp_path / "whole", 2, sections(EXCHANGE))
    trained(pool, tmp_path / "cut", 3, sections("dense", sharding="zero2"), until=3)
    found = trained(pool, tmp_path / "cut", 2, sections(EXCHANGE), resume=True, fresh_plan=True)
    torch.testing.assert_close(torch.tensor(found[0]["values"]), torch.tensor(whole[0]["values"]))
    module = Small(0.0)
    read_model(module, tmp_path / "cut" / "run" / "checkpoints")
    assert zeros_are_exact(module)


def test_pipeline_stages_mask_their_own_layers(pool: Pool, tmp_path: Path) -> None:
    whole = trained(pool, tmp_path / "one", 1, sections(), kind="causal")
    staged = trained(pool, tmp_path / "two", 2, sections(EXCHANGE, mesh={"pipe": 2}), kind="causal", values=False)
    module = Causal()
    read_model(module, tmp_path / "two" / "run" / "checkpoints")
    assert zeros_are_exact(module)
    values = [x for _, p in sorted(module.named_parameters()) for x in p.detach().flatten().tolist()]
    torch.testing.assert_close(torch.tensor(values), torch.tensor(whole[0]["values"]), rtol=1e-4, atol=1e-5)
    assert len(staged) == 2


def test_masks_of_a_start_folder_are_held_on_any_ranks(pool: Pool, tmp_path: Path) -> None:
    rule = {"static_mask": {"inner": {"adamw": {"lr": 1e-2}}, "masks": "start"}}
    module = model()
    masks = {n: torch.rand(p.shape) > 0.5 for n, p in module.named_parameters() if n.endswith("_proj.weight")}
    for name, mask in masks.items():
        module.get_parameter(name).data.mul_(mask)
    content = StartContent(
        tensors={name: tensor.detach() for name, tensor in start_state(module)},
        method="by_hand",
        source="0",
        masks=masks,
    )
    write_start(tmp_path / "start", content)
    found = {}
    for ranks, plan in ((1, {}), (2, {"sharding": "zero2"})):
        found[ranks] = run(
            pool, tmp_path / f"run{ranks}", tmp_path / "start", ranks, plan=plan, train={"optimizer": rule}
        )
        for name, mask in masks.items():
            stored = open_checkpoint(tmp_path / f"run{ranks}" / "checkpoints", STEPS)
            assert torch.equal(stored.read(f"model/{name}") != 0, mask)
    assert found[1] == pytest.approx(found[2], rel=1e-5)


def test_islands_that_train_apart_keep_the_mask(pool: Pool, tmp_path: Path) -> None:
    """Averages of zeros are zeros; the masked exchange of a round is dense of the same mask, bit for bit."""
    found = {}
    for name, exchange in {"dense": "dense", "masked": EXCHANGE}.items():
        plan = {"exchange": "dense", "sync": {"diloco": {"sync_every": 2, "exchange": exchange}}}
        found[name] = trained(pool, tmp_path / name, 2, {**sections(), "plan": plan})
        module = Small(0.0)
        read_model(module, tmp_path / name / "run" / "checkpoints")
        assert zeros_are_exact(module)
    assert found["dense"][0]["values"] == found["masked"][0]["values"]
