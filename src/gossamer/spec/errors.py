"""The errors Gossamer raises, and the one form they take: wanted, got, where, what to do."""

from __future__ import annotations


class BadInput(ValueError):
    """An error in the user's configuration or input, found before anything was started or written. Exit code 2.

    `key` is the dotted configuration key it concerns ("train.batch"), "" if there is none. The caller that knows the
    file of that key (the command line) adds file:line.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


def bad_input(*, wanted: str, got: str, do: str, key: str = "") -> BadInput:
    """Return a `BadInput` whose message reads "wanted ..., got ...: <what to do>"."""
    return BadInput(f"wanted {wanted}, got {got}: {do}", key=key)


class RunFailed(RuntimeError):
    """The base class of failures of a run whose configuration was valid. Exit code 3."""


class NoPlan(RunFailed):
    """The failure to find a plan that satisfies the constraints; the message names the tightest one."""


class PeerLost(RunFailed):
    """The failure of an exchange because one of its ranks died, stopped, or cannot be reached."""


class TeacherLost(RunFailed):
    """The loss of a teacher on another host, which the run cannot go on without; the message names its address."""


class WireMismatch(RunFailed):
    """A disagreement between ranks about a message on the wire (size, type, step, configuration)."""


class CheckpointMismatch(RunFailed):
    """A checkpoint that is truncated, altered, or of another model; the message names the slice."""


class Untrustworthy(RunFailed):
    """The error for a rank whose work or parameters the majority found wrong; the message names the rank."""


class StepRejected(RunFailed):
    """The error for a non-finite loss or gradient where `train.on_nonfinite` says to stop, or where a step of a user's
    own loop has begun to move parameters.
    """


class Interrupted(Exception):
    """The end of a run that was asked to stop and has saved a checkpoint. Exit code 4."""
