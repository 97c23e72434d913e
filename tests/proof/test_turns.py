"""Replicas that take turns in one module: each goes on with its own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.proof.replica_turns import ReplicaTurns

OUTSIDE: list[int] = []


class Keeps(nn.Module):
    """Counts in a buffer, in a list, in an attribute and in a global."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []
        self.last, self.writes = 0, writes

    def forward(self, x: int) -> Tensor:
        self.count += 1
        self.seen.append(x)
        self.last = x
        OUTSIDE.append(x)
        if self.writes:
            self.weight.data.mul_(2)
        return (self.weight * x).sum()

    def state(self) -> tuple[float, list[int], int, list[int]]:
        return float(self.count), [*self.seen], self.last, [*OUTSIDE]


@dataclass(frozen=True)
class Alike:
    """As much of an engine as is asked for."""

    module: Keeps


@pytest.fixture(autouse=True)
def nothing_outside() -> None:
    OUTSIDE.clear()


def turns_of(writes: bool = False, **given: Any) -> ReplicaTurns:
    found = ReplicaTurns(make=lambda: Alike(Keeps(writes)), **given)  # type: ignore[arg-type, return-value]
    found.begin(2)
    return found


def play(turns: ReplicaTurns, place: int, *given: int) -> tuple[float, list[int], int, list[int]]:
    module: Any = turns.to(place).module
    for x in given:
        module(x).backward()
    return module.state()


def test_each_goes_on_where_it_was() -> None:
    turns = turns_of()
    assert play(turns, 0, 1, 2) == (2, [1, 2], 2, [1, 2])
    assert play(turns, 1, 3) == (1, [3], 3, [3])
    assert play(turns, 0, 4) == (3, [1, 2, 4], 4, [1, 2, 4])
    assert play(turns, 1, 5) == (2, [3, 5], 5, [3, 5])
    assert turns.changes and not turns.writes and len(turns.engines) == 1
    gradient = turns.gradient("weight")
    assert gradient is not None and gradient.tolist() == [15.0] * 3, "of all of them"


def test_who_joins_begins_with_what_the_first_has_left() -> None:
    turns = turns_of(joins=True)
    play(turns, 0, 1, 2)
    assert play(turns, 1, 3) == (3, [1, 2, 3], 3, [1, 2, 3])
    assert play(turns, 0, 4) == (3, [1, 2, 4], 4, [1, 2, 4])
    assert play(turns, 1, 5) == (4, [1, 2, 3, 5], 5, [1, 2, 3, 5])


def test_what_writes_to_its_parameters_is_made_twice() -> None:
    turns = turns_of(writes=True)
    play(turns, 0, 1)
    play(turns, 1, 1, 1)
    assert turns.writes and [float(e.module.weight[0].detach()) for e in turns.engines] == [2.0, 4.0]  # type: ignore[index]
    gradient = turns.gradient("weight")
    assert gradient is not None and gradient.tolist() == [3.0] * 3


def test_a_module_that_keeps_nothing_says_so() -> None:
    turns = ReplicaTurns(make=lambda: Alike(nn.Linear(2, 2)))  # type: ignore[arg-type, return-value]
    turns.begin(2)
    turns.to(0).module(torch.ones(2)).sum().backward()
    turns.to(1)
    assert not turns.changes and not turns.writes and not turns.counted


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_buffer_that_a_checkpoint_keeps_and_a_forward_changes_is_named(is_kept: bool) -> None:
    module = Keeps()
    module.register_buffer("count", torch.zeros(()), persistent=is_kept)
    turns = ReplicaTurns(make=lambda: Alike(module))  # type: ignore[arg-type, return-value]
    turns.begin(2)
    turns.to(0).module(1)
    turns.to(1)
    assert turns.counted == ("count" if is_kept else "")
