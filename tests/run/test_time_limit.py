"""The time limit of a run: what all ranks decide alike, whatever each one's clock says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from gossamer.optimizer.lr_schedule.cosine import Cosine
from gossamer.run.goal import Goal
from gossamer.run.time_limit import TimeLimit
from gossamer.spec.records import Record


def fitted(spent_s: float, *, agreed: float) -> int:
    """The steps of a run of 10 s on the rank that has spent `spent_s` for 25 steps, where `agreed` fit on another."""
    said: list[Record] = []
    replica = SimpleNamespace(gather=lambda row: torch.tensor([row, (agreed,)]))
    limit = TimeLimit(
        most_steps=1000,
        rate=Cosine(warmup=500),
        replica=cast(Any, replica),
        evaluator=cast(Any, SimpleNamespace(estimate_s=lambda pace_s: 0.0)),
        sink=said.append,
    )
    goal = Goal(steps=1000, evaluate_every=0, checkpoint_every=0, seed=0, seconds=10.0)
    return limit.fit(goal, 25, 25, spent_s).steps


def test_in_a_warm_up_that_is_longer_all_ranks_end_at_the_same_step() -> None:
    assert fitted(9.9, agreed=25.0) == fitted(10.1, agreed=25.2) == 25
    assert fitted(5.0, agreed=49.0) == fitted(5.1, agreed=50.0) == 1000
