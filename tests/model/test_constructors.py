"""Whatever a constructor does, a stage holds what one process would hold, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gossamer import loss
from gossamer.cutting import Asked, Held, OriginSource, hold
from gossamer.model.cut.construction import tensors_of
from gossamer.model.origin.factory import Factory
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from model.constructors import COMPUTED, SIMPLE, WORDS, reset

STAGES = 3
ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, WORDS, (8, 10), generator=torch.Generator().manual_seed(5))
]


def source(kind: str, function: str = "model.constructors:made") -> OriginSource:
    """As in a new process."""
    reset()
    return OriginSource(Factory(function, {"kind": kind} if kind else {}), 3)


def held(given: Any, rank: int, ranks: int = STAGES) -> Held:
    config = RunConfig.model_validate({"train": {"batch": 8}, "plan": {"mesh": {"pipe": ranks}}})
    asked = Asked(
        config=config,
        ranks=ranks,
        rank=rank,
        batches=DatasetBatches(ROWS),  # type: ignore[arg-type]
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    return hold(given, asked)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: frozenset[str]) -> None:
    for name in names:
        assert not isinstance(ours[name], FakeTensor), name
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", [*SIMPLE, *COMPUTED])
def test_a_stage_holds_what_one_process_holds(kind: str) -> None:
    whole = tensors_of(source(kind).whole())
    seen = set()
    for rank in range(STAGES):
        ours = held(source(kind), rank)
        assert ours.cut is not None
        same(tensors_of(ours.module), whole, ours.cut.holds)
        seen |= ours.cut.holds
        assert ours.plan.reasons.get("build", "").startswith("whole on every rank: ") == (kind in COMPUTED)
    assert seen >= {name for name, _ in source(kind).whole().named_parameters()}
