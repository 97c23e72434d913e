"""Schedule-free optimizers in whole runs: trained at one point, evaluated and exported at another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossamer import recipe
from gossamer.run.checkpoint import read_model
from gossamer.run.start_checks import check_before_start
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, CheckpointMismatch
from gossamer.spec.plan import Plan
from gossamer.store.checkpoint import open_checkpoint
from pool import Pool
from run.jobs import VALIDATION, Small
from run.test_untouched import parts_of

OPTIMIZER = {"schedule_free_adamw": {"lr": 2e-2, "weight_decay": 0.1}}
SCHEDULE = {"constant": {"warmup": 2}}
ZERO = ("zero1", "zero2", "zero3")


def sections(sharding: Any = "none", **train: Any) -> dict[str, dict[str, Any]]:
    plan = {"sharding": sharding, "exchange": "dense"}
    return {"plan": plan, "train": {"optimizer": OPTIMIZER, "lr_schedule": SCHEDULE, "evaluate_every": 2, **train}}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def exported(folder: Path, checkpoint: str | int = "latest") -> nn.Module:
    module = Small(0.0)
    read_model(module, folder / "run" / "checkpoints", checkpoint=checkpoint)
    return module.eval()


def values_of(module: nn.Module) -> list[float]:
    return [x for _, p in sorted(module.named_parameters()) for x in p.detach().flatten().tolist()]


@torch.no_grad()
def loss_of(module: nn.Module) -> float:
    data = VALIDATION["validation"]
    rows = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    logits = module(rows["input_ids"], rows["scale"])[:, :-1]
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"][:, 1:].flatten()))


def test_what_is_evaluated_and_exported_is_the_average(pool: Pool, tmp_path: Path) -> None:
    """The evaluation, the checkpoint as it is read, the best checkpoint and the caller's module: all of them."""
    given = {"folder": str(tmp_path), "values": True, "words": False}
    (found,) = pool.run("run.jobs:train", 1, sections=sections(keep_best=True, checkpoint_every=2), **given)
    evaluated = {one["step"]: one["loss"] for one in records(tmp_path, "evaluation")}
    assert sorted(evaluated) == [2, 4, 6]
    for step, loss in evaluated.items():
        if (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").is_dir():
            assert loss_of(exported(tmp_path, step)) == pytest.approx(loss, rel=1e-5)
    best = records(tmp_path, "best")[-1]
    assert loss_of(exported(tmp_path, "best")) == pytest.approx(best["value"], rel=1e-5)
    assert values_of(exported(tmp_path)) == found["values"]
    trained = open_checkpoint(tmp_path / "run" / "checkpoints", 6)
    apart = trained.read("model/embed.weight") - exported(tmp_path).get_parameter("embed.weight")
    assert apart.abs().max() > 1e-3  # a checkpoint holds the trained point


@pytest.mark.parametrize("sharding", ZERO)
def test_sharded_states_evaluate_the_same_average(pool: Pool, tmp_path: Path, sharding: str) -> None:
    found = {}
    for one in ("none", sharding):
        given = {"folder": str(tmp_path / one), "values": True, "sections": sections(one)}
        found[one] = pool.run("run.jobs:train", 3, **given)
        assert len({rank["digest"] for rank in found[one]}) == 1
    plain, ours = (torch.tensor(found[one][0]["values"]) for one in ("none", sharding))
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
    losses = [[one["loss"] for one in records(tmp_path / which, "evaluation")] for which in ("none", sharding)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
    if sharding == "zero3":
        return
    read = torch.tensor(values_of(exported(tmp_path / "none")))
    assert torch.equal(read, plain)


@pytest.mark.parametrize(("sharding", "ranks"), [("none", 1), ("zero1", 2), ("zero3", 2)])
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, sharding: str, ranks: int) -> None:
    """Evaluations between the steps change nothing either: the trained point is put back as it was."""
    straight = pool.run("run.jobs:train", ranks, folder=str(tmp_path / "a"), sections=sections(sharding))
    unseen = pool.run(
        "run.jobs:train", ranks, folder=str(tmp_path / "b"), sections=sections(sharding, evaluate_every=0)
    )
    for more in ({"until": 3}, {"resume": True}):
        broken = pool.run("run.jobs:train", ranks, folder=str(tmp_path / "c"), sections=sections(sharding), **more)
    assert straight[0]["digest"] == unseen[0]["digest"] == broken[0]["digest"]


def test_another_number_of_ranks_and_other_states_go_on(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run("run.jobs:train", 2, folder=str(tmp_path / "a"), values=True, sections=sections())
    given: dict[str, Any] = {"folder": str(tmp_path / "b"), "values": True, "fresh_plan": True}
    pool.run("run.jobs:train", 3, sections=sections("zero2"), until=3, **given)
    broken = pool.run("run.jobs:train", 1, sections=sections(), resume=True, **given)
    ours, plain = (torch.tensor(one[0]["values"]) for one in (broken, straight))
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_stages_evaluate_the_average_of_each(pool: Pool, tmp_path: Path) -> None:
    staged = {**sections(), "plan": {"mesh": {"pipe": 2}}}
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "a"), sections=staged)
    pool.run("run.jobs:train", 1, folder=str(tmp_path / "b"), sections=sections())
    plain, ours = (torch.tensor(values_of(exported(tmp_path / one))) for one in ("b", "a"))
    assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)
    losses = [[one["loss"] for one in records(tmp_path / which, "evaluation")] for which in ("a", "b")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3


def test_states_on_disks_of_their_own_are_refused_by_a_reader(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "{rank}")
    pool.run("run.jobs:train", 2, folder=folder, hosts=2, disks=True, sections=sections("zero1"))
    with pytest.raises(CheckpointMismatch, match="the model is an average of these and the parameters"):
        exported(tmp_path / "0")


def test_a_run_of_another_optimizer_is_named(pool: Pool, tmp_path: Path) -> None:
    pool.run("run.jobs:train", 1, folder=str(tmp_path), until=3, sections=sections())
    with pytest.raises(Exception, match=r"trained with another optimizer.*the saved one schedule_free_adamw"):
        pool.run(
            "run.jobs:train", 1, folder=str(tmp_path), resume=True, sections=sections(optimizer={"adamw": {"lr": 1e-3}})
        )


@pytest.mark.parametrize(
    ("train", "plan", "said"),
    [
        ({"lr_schedule": "cosine"}, {}, "a learning rate that never falls with .*got train.lr_schedule cosine"),
        ({"lr_schedule": "warmup_stable_decay"}, {}, "set train.lr_schedule to .constant: .warmup: 0.02"),
        ({}, {"sync": {"diloco": {"sync_every": 3}}}, "as rounds move the parameters alone"),
        ({}, {"sync": "auto", "exchange": "auto"}, "as rounds move the parameters alone"),
        ({}, {"sharding": "sdp4bit"}, "as ranks would evaluate a coded average"),
    ],
)
def test_what_it_does_not_go_with(train: dict[str, Any], plan: dict[str, Any], said: str) -> None:
    given = {"batch": 4, "optimizer": OPTIMIZER, "lr_schedule": SCHEDULE}
    config = RunConfig.model_validate({"train": {**given, **train}, "plan": plan})
    replicas = {"mesh": {"replica": 2}, "batch_fractions": (0.5, 0.5), "rows": (2, 2), "microbatches": (1, 1)}
    with pytest.raises(BadInput, match=said):
        recipe.check(config, Plan.model_validate({**replicas, **plan}))
    recipe.check(RunConfig.model_validate({"train": given}), Plan.model_validate(replicas))


def test_running_statistics_are_refused() -> None:
    train = {"optimizer": "schedule_free_sgd", "lr_schedule": "constant"}
    check_before_start(parts_of(Small(0.0), **train))
    with pytest.raises(BadInput, match=r"wanted a model without running statistics.*got 1 modules.*such as extra"):
        module = Small(0.0)
        module.extra = nn.BatchNorm1d(3)
        check_before_start(parts_of(module, **train))
    module.extra = nn.BatchNorm1d(3, track_running_stats=False)
    check_before_start(parts_of(module, **train))
