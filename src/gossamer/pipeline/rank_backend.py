"""The schedule backend of one rank in a real run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gossamer.pipeline.executor import ScheduleBackend
from gossamer.spec.action import Action, Op


class StageWork(Protocol):
    """The operations of schedule actions on a stage's modules; the owner of the modules implements them."""

    def forward(self, stage: int, batch: int) -> None:
        """Run the stage on micro-batch `batch`, and keep what its backward needs."""

    def backward(self, stage: int, batch: int) -> None:
        """Accumulate the micro-batch's gradients, and free its activations."""

    def backward_input(self, stage: int, batch: int) -> None:
        """Compute the gradients of the stage's inputs, the first half of a backward."""

    def backward_weight(self, stage: int, batch: int) -> None:
        """Accumulate the parameters' gradients, the second half of a backward, and free the activations."""

    def recompute(self, stage: int, batch: int) -> None:
        """Run the forward again to restore the activations that it did not keep."""

    def send(self, action: Action) -> None:
        """Send the stage's output or input gradient of the micro-batch to the rank that needs it; SEND_F, SEND_B."""

    def receive(self, action: Action) -> None:
        """Wait for the input or output gradient that the stage needs for the micro-batch; RECV_F, RECV_B."""

    def reduce(self, stage: int) -> None:
        """Average the stage's gradients over all replicas, after all its backwards."""


@dataclass(frozen=True, slots=True)
class RankBackend(ScheduleBackend):
    """The schedule backend of one rank, which runs `work` for each action.

    `rank` counts within the schedule (0 where there is one stage only), not within the run.
    """

    rank: int
    work: StageWork

    @property
    def ranks(self) -> Sequence[int]:
        return (self.rank,)

    def ready_s(self, rank: int, action: Action) -> float | None:
        return 0.0  # each action waits itself for its input from other ranks

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
                raise AssertionError(f"{action}: the schedule backend of a rank cannot run {action.op.name}")
