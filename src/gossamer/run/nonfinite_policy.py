"""Decide what follows a non-finite step: commit, retry, skip or stop. All ranks decide alike, from one agreement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossamer.run.loss_scale import LossScale
from gossamer.sync import StepAgreement


class NonFiniteAction(Enum):
    """The action after an attempt at a step: commit the update, retry, skip the samples, or stop the run."""

    COMMIT = "commit"
    RETRY = "retry"
    SKIP = "skip"
    STOP = "stop"


@dataclass(slots=True)
class NonFinitePolicy:
    """The policy for non-finite steps, `train.on_nonfinite`.

    `policy`: retry_skip_stop retries a step once (a flipped bit does not recur), then skips its samples, and stops
    after `patience` rejected steps in a row; skip never stops; stop never skips. With fp16, an overflow first lowers
    the loss scale and retries: that is part of the method, not a failure.
    """

    policy: str
    patience: int = 5
    in_a_row: int = 0
    _retried: bool = False

    def judge(self, agreement: StepAgreement, scaling: LossScale) -> NonFiniteAction:
        """Return the action after one attempt at a step."""
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
