"""The errors Gossamer raises, and the one form they take: wanted, got, where, what to do."""

from __future__ import annotations


class BadInput(ValueError):
    """The user gave something that cannot work; found before anything was started or written. Exit code 2.

    `key` is the dotted configuration key the complaint is about ("train.batch"), when there is one: whoever
    knows the file it came from (the command line does) adds file:line.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


def bad_input(*, wanted: str, got: str, do: str, key: str = "") -> BadInput:
    """A `BadInput` in the house form: "wanted ..., got ...: <what to do>"."""
    return BadInput(f"wanted {wanted}, got {got}: {do}", key=key)


class RunFailed(RuntimeError):
    """Something happened to a run that was well formed. Exit code 3."""


class NoPlan(RunFailed):
    """No plan satisfies the constraints; the message names the tightest one."""


class PeerLost(RunFailed):
    """A rank that takes part in an exchange died, stopped, or cannot be reached."""


class WireMismatch(RunFailed):
    """Ranks disagree about what is on the wire (size, type, step, configuration)."""


class CheckpointMismatch(RunFailed):
    """A checkpoint is truncated, altered, or belongs to another model; the message names the slice."""


class Untrustworthy(RunFailed):
    """The majority found a rank whose work, or whose parameters, are not what they should be; the message names it."""


class StepRejected(RunFailed):
    """A loss or gradient was not finite and the policy says stop."""


class Interrupted(Exception):
    """The run was asked to stop and has saved a checkpoint. Exit code 4."""
