"""The player in three worlds: one rank with a stage of work, all stages of a real model in lockstep, and none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.executor import ScheduleBackend, ScheduleDeadlock, execute
from gossamer.pipeline.passes import with_transfers
from gossamer.pipeline.rank_backend import RankBackend
from gossamer.pipeline.schedule import Schedule, build
from gossamer.spec.action import Action, Op
from pipeline.orders import gpipe, listed, one_f_one_b, vee


@dataclass
class Notes:
    """Stage work that writes down what it is asked for."""

    said: list[str] = field(default_factory=list)

    def forward(self, stage: int, batch: int) -> None:
        self.said.append(f"{stage}F{batch}")

    def backward(self, stage: int, batch: int) -> None:
        if batch == 7:
            raise FloatingPointError("seven")
        self.said.append(f"{stage}B{batch}")

    def reduce(self, stage: int) -> None:
        self.said.append(f"{stage}RG")


def test_a_rank_does_its_list() -> None:
    notes = Notes()
    schedule = build("single_stage").make(stages=1, ranks=1, microbatches=3)
    execute(schedule, RankBackend(0, notes))
    assert notes.said == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0RG"] == [str(a) for a in schedule.ranks[0]]


def test_a_rank_does_its_own_list_only() -> None:
    notes = Notes()
    execute(build("forward_only").make(stages=3, ranks=3, microbatches=2), RankBackend(2, notes))
    assert notes.said == ["2F0", "2F1"]


def test_what_work_raises_ends_the_play() -> None:
    notes = Notes()
    with pytest.raises(FloatingPointError):
        execute(build("single_stage").make(stages=1, ranks=1, microbatches=9), RankBackend(0, notes))
    assert notes.said[-1] == "0F7"


@dataclass
class Lockstep(ScheduleBackend):
    """All stages in one process: real modules, real autograd, tensors handed over through a table."""

    schedule: Schedule
    stages: list[nn.Module]
    batches: list[tuple[Tensor, Tensor]]
    wire: dict[Action, Tensor] = field(default_factory=dict)
    live: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # (input leaf, output)
    done: set[Action] = field(default_factory=set)

    @property
    def ranks(self) -> Sequence[int]:
        return range(len(self.schedule.ranks))

    def ready_s(self, rank: int, action: Action) -> float | None:
        return 0.0 if all(n in self.done for n in Dependencies.of(self.schedule)(action)) else None

    def do(self, rank: int, action: Action) -> None:
        stage, batch, last = action.stage, action.batch, len(self.stages) - 1
        if action.op is Op.F:
            x = self.wire.pop(Action(Op.F, stage, batch)) if stage else self.batches[batch][0]
            x = x.detach().requires_grad_()
            y = self.stages[stage](x)
            if stage == last:
                y = (y - self.batches[batch][1]).square().sum()
            else:
                self.wire[Action(Op.F, stage + 1, batch)] = y
            self.live[stage, batch] = (x, y)
        if action.op is Op.B:
            x, y = self.live.pop((stage, batch))
            y.backward(self.wire.pop(Action(Op.B, stage, batch)) if stage < last else None)
            if stage:
                self.wire[Action(Op.B, stage - 1, batch)] = x.grad
        self.done.add(action)


@pytest.mark.parametrize(
    "make", [lambda: gpipe(4, 3), lambda: one_f_one_b(4, 3), lambda: vee(3), lambda: with_transfers(vee(3))]
)
def test_lockstep_gradients_equal_the_uncut_model(make: Callable[[], Schedule]) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(4)]
    batches = [(torch.randn(2, 6).double(), torch.randn(2, 6).double()) for _ in range(3)]
    for x, y in batches:
        (nn.Sequential(*layers)(x) - y).square().sum().backward()
    whole = [p.grad.clone() for p in nn.ModuleList(layers).parameters()]
    nn.ModuleList(layers).zero_grad()
    schedule = make()
    world = Lockstep(schedule, list(layers), batches)
    execute(schedule, world)
    assert not world.live and not world.wire
    for a, p in zip(whole, nn.ModuleList(layers).parameters(), strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-12, atol=1e-14)


def test_stuck_names_who_waits_for_what() -> None:
    stuck = listed("stuck", ["0F0 0B0 0F1 0B1 0RG", "1F0 1F1 1B0 1B1 1RG"], (0, 1), 2)
    world = Lockstep(stuck, [nn.Identity(), nn.Identity()], [(torch.ones(1), torch.zeros(1))] * 2)
    with pytest.raises(ScheduleDeadlock) as caught:
        execute(stuck, world)
    assert {r: str(a) for r, a in caught.value.waiting.items()} == {0: "0B0", 1: "1F1"}
