"""What a step that is not finite leads to. All ranks see the same agreement, so all come to the same verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossamer.run.loss_scale import LossScale
from gossamer.sync import StepAgreement


class NonFiniteAction(Enum):
    COMMIT = "commit"
    RETRY = "retry"
    SKIP = "skip"
    STOP = "stop"


@dataclass(slots=True)
class NonFinitePolicy:
    """`policy` is train.on_nonfinite: retry_skip_stop tries a step once more (a flipped bit does not come back),
    then skips its samples, and stops after `patience` rejected steps in a row; skip never stops; stop never skips.

    With fp16 an overflow first lowers the loss scale and tries again: that is part of the method, no failure.
    """

    policy: str
    patience: int = 5
    in_a_row: int = 0
    _retried: bool = False

    def judge(self, agreement: StepAgreement, scaling: LossScale) -> NonFiniteAction:
        """The verdict on one attempt."""
        if agreement.finite:
            self.in_a_row, self._retried = 0, False
            return NonFiniteAction.COMMIT
        if scaling.overflowed():
            return NonFiniteAction.RETRY
        if self.policy == "retry_skip_stop" and not self._retried:
            self._retried = True
            return NonFiniteAction.RETRY
        self._retried = False
        self.in_a_row += 1
        if self.policy == "stop" or (self.policy == "retry_skip_stop" and self.in_a_row >= self.patience):
            return NonFiniteAction.STOP
        return NonFiniteAction.SKIP
