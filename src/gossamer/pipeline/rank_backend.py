"""One rank of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gossamer.pipeline.executor import ScheduleBackend
from gossamer.spec.action import Action, Op


class StageWork(Protocol):
    """What the actions of a schedule do to a model: whoever owns the modules provides it."""

    def forward(self, stage: int, batch: int) -> None:
        """Run the stage on micro-batch `batch`, and keep what its backward needs."""

    def backward(self, stage: int, batch: int) -> None:
        """Add the micro-batch's gradients, and free what was kept."""

    def backward_input(self, stage: int, batch: int) -> None:
        """Of a backward, the gradients of what the stage received."""

    def backward_weight(self, stage: int, batch: int) -> None:
        """The rest of it: add the parameters' gradients, and free what was kept."""

    def recompute(self, stage: int, batch: int) -> None:
        """Make again what a forward did not keep for its backward."""

    def send(self, action: Action) -> None:
        """Let what the stage made of the micro-batch go to where it is needed; SEND_F, SEND_B."""

    def receive(self, action: Action) -> None:
        """Wait for what the stage needs of the micro-batch; RECV_F, RECV_B."""

    def reduce(self, stage: int) -> None:
        """All backwards of the stage are done: its gradients become those of all replicas."""


@dataclass(frozen=True, slots=True)
class RankBackend(ScheduleBackend):
    """`rank` counts within the schedule (0 where one stage is all there is), not within the run."""

    rank: int
    work: StageWork

    @property
    def ranks(self) -> Sequence[int]:
        return (self.rank,)

    def ready_s(self, rank: int, action: Action) -> float | None:
        return 0.0  # what an action needs from elsewhere it waits for itself

    def do(self, rank: int, action: Action) -> None:
        match action.op:
            case Op.F:
                self.work.forward(action.stage, action.batch)
            case Op.B:
                self.work.backward(action.stage, action.batch)
            case Op.B_INPUT:
                self.work.backward_input(action.stage, action.batch)
            case Op.B_WEIGHT:
                self.work.backward_weight(action.stage, action.batch)
            case Op.RECOMPUTE:
                self.work.recompute(action.stage, action.batch)
            case Op.SEND_F | Op.SEND_B:
                self.work.send(action)
            case Op.RECV_F | Op.RECV_B:
                self.work.receive(action)
            case Op.REDUCE_GRADS:
                self.work.reduce(action.stage)
            case _:
                raise AssertionError(f"{action}: this world knows no such action")
