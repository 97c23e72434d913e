"""Errors of a split model, in the words of whoever asked for it: a training in stages, a teacher that is served so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gossamer.spec.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitArguments:
    """What a caller calls the choices of a split, its settings or arguments.

    stages: how many there are; cuts: where they begin; units: what is never divided, "" where nobody chooses that;
    whole: what to do to have no stages.
    """

    stages: str
    cuts: str
    units: str
    whole: str

    def or_units(self, said: str) -> str:
        """Return a second thing to do, by naming units; "" where units cannot be named."""
        return f", or {said} ({self.units})" if self.units else ""

    def units_or(self, said: str, other: str) -> str:
        """Return a first thing to do, by naming units, and another one, which stands alone where they cannot be."""
        return f"{said} ({self.units}), or {other}" if self.units else other


TRAINING = SplitArguments(stages="plan.mesh.pipe", cuts="plan.cuts", units="plan.units", whole="set plan.mesh.pipe: 1")
Do = Callable[[SplitArguments], str]


class SplitError(BadInput):
    """An error of a split, which a training in stages words as it is, and others by `in_words_of`.

    what: what happened; do: what to do about it; about: the choice that it concerns.
    """

    def __init__(self, what: str, do: Do, about: Literal["stages", "cuts"] = "stages") -> None:
        super().__init__(f"{what}: {do(TRAINING)}", key=getattr(TRAINING, about))
        self.what, self.do, self.about = what, do, about

    def said(self, arguments: SplitArguments) -> BadInput:
        """Return the error of a caller with these arguments."""
        return BadInput(f"{self.what}: {self.do(arguments)}", key=getattr(arguments, self.about))


def split_error(*, wanted: str, got: str, do: str | Do, about: Literal["stages", "cuts"] = "stages") -> SplitError:
    """Return the error "wanted ..., got ...: <what to do>" of a split."""
    said: Do = (lambda _: do) if isinstance(do, str) else do
    return SplitError(f"wanted {wanted}, got {got}", said, about)


@contextmanager
def in_words_of(arguments: SplitArguments) -> Iterator[None]:
    """Let the errors of a split in this context name the arguments of who asked for it."""
    try:
        yield
    except SplitError as error:
        raise error.said(arguments) from None
