"""Parameters that got no gradient in a step stay as they are: no decay, no momentum, no count, as in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.run.batches import Feed
from run.jobs import Branches
from run.test_untouched import parts_of, run_alone

NEVER = ("never.weight", "never.bias")
RULE: dict[str, Any] = {"adamw": {"lr": 0.05, "weight_decay": 0.5}}


def made() -> Branches:
    torch.manual_seed(0)
    return Branches()


def plain(optimizer: Any, module: Branches, steps: int) -> int:
    """The loop that everybody writes; in how many steps the branch had a gradient."""
    parts, used = parts_of(module, batch=2, accumulate=1), 0
    for step in range(steps):
        (piece,) = Feed(parts.train, parts.plan, 0, 0).fetch(step).values()
        optimizer.zero_grad()
        parts.objective(module(piece.rows["input_ids"]), piece.rows).backward()
        used += module.even.weight.grad is not None
        optimizer.step()
    return used


def test_one_process_is_torch(tmp_path: Path) -> None:
    steps, ours, theirs = 9, made(), made()
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": matrices}, vectors], lr=0.05, betas=(0.9, 0.95), weight_decay=0.5)
    assert 2 <= plain(optimizer, theirs, steps) <= steps - 2, "in some steps it is used, in some it is not"
    rule = {"adamw": {"lr": 0.05, "weight_decay": 0.5, "betas": [0.9, 0.95], "eps": 1e-8}}
    run_alone(parts_of(ours, steps=steps, batch=2, accumulate=1, optimizer=rule), tmp_path)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=name)
    for name in NEVER:
        assert torch.equal(ours.get_parameter(name), made().get_parameter(name))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"plan": {"sharding": "zero1"}},
        {"plan": {"sharding": "zero3"}},
        {"plan": {"exchange": {"error_feedback": {"topk": {"fraction": 0.2}}}}},
        {"plan": {"sync": {"local_sgd": {"sync_every": 2}}}, "machines": {"islands": [[0], [1]]}},
        {"train": {"optimizer": {"lamb": {"lr": 0.05, "weight_decay": 0.5}}}},
    ],
    ids=json.dumps,
)
def test_what_nobody_uses_stays(pool: Any, tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    given = {**sections, "train": {"optimizer": RULE, **sections.get("train", {})}}
    found = pool.run("run.jobs:train", 2, folder=str(tmp_path), kind="branches", sections=given, values=True)
    assert found[0]["values"] == found[1]["values"]
    values, at = torch.tensor(found[0]["values"]), 0
    for name, param in sorted(made().named_parameters()):
        now, at = values[at : at + param.numel()], at + param.numel()
        assert torch.equal(now, param.detach().flatten()) == (name in NEVER), name


def test_ranks_and_resuming_do_not_change_who_is_counted(pool: Any, tmp_path: Path) -> None:
    """One rank may use what the other does not; checkpoints keep the counts."""
    sections = {"train": {"optimizer": RULE, "batch": 4}}
    common = {"kind": "branches", "sections": sections, "values": True, "steps": 8}
    (one,) = pool.run("run.jobs:train", 1, folder=str(tmp_path / "one"), **common)
    pool.run("run.jobs:train", 2, folder=str(tmp_path / "two"), until=5, **common)
    two, _ = pool.run("run.jobs:train", 2, folder=str(tmp_path / "two"), resume=True, **common)
    torch.testing.assert_close(torch.tensor(two["values"]), torch.tensor(one["values"]), rtol=1e-4, atol=1e-5)
