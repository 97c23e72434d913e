"""Decisions of one process that others wait for: the first does something once, and all learn what came of it.

The first process does it and tells the others its result, or its error, which all then raise. Otherwise each answers
whether it can go on, and the first tells all of them the outcome: all go on, or all raise the same error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from gossamer.process.json_lines import Said
from gossamer.spec.errors import BadInput, Interrupted, RunFailed

SEEN_S = 30.0


class Failure(Said):
    """An error, as another process raises it. `key`: of the configuration, of a BadInput."""

    what: Literal["bad_input", "interrupted", "failed"]
    message: str
    key: str = ""


class Word(Said):
    """What a process says: the text of a decision, an answer or an outcome; or the error that ends all."""

    text: str = ""
    failure: Failure | None = None


WORD: TypeAdapter[Word] = TypeAdapter(Word)


class Line(ABC):
    """The connection of one process with the first, and of the first with all others. Words arrive in order."""

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether this is the first process."""

    @abstractmethod
    def tell(self, word: Word) -> None:
        """Send a word to the first process; from the first: to all others."""

    @abstractmethod
    def heard(self) -> list[Word]:
        """Wait for the next word of the first process; on the first: of each other. Raises PeerLost, WireMismatch."""


@dataclass(frozen=True, slots=True)
class Alone(Line):
    """The line of a process that is the only one."""

    @property
    def is_first(self) -> bool:
        return True

    def tell(self, word: Word) -> None:
        pass

    def heard(self) -> list[Word]:
        return []


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of several processes over a line."""

    line: Line

    def agreed(self, make: Callable[[], str], refusal: Callable[[], BaseException | None] = lambda: None) -> str:
        """Return what `make`, called on the first process alone, returned there. All processes must call it.

        refusal: called once `make` is done; why this process does not go on, None: it does. Raises the error of `make`
        on all processes, or the first refusal.
        """
        if not self.line.is_first:
            (decision,) = self.line.heard()
            _raise_for(decision.failure)
            why = refusal()
            self.line.tell(Word(failure=None if why is None else failure_of(why)))
            _raise_for(self.line.heard()[0].failure)
            return decision.text
        try:
            text = make()
            if (why := refusal()) is not None:
                raise why
        except BaseException as error:
            self.line.tell(Word(failure=failure_of(error)))
            raise
        self.line.tell(Word(text=text))
        failure = next((answer.failure for answer in self.line.heard() if answer.failure is not None), None)
        self.line.tell(Word(failure=failure))
        _raise_for(failure)
        return text


def appears(is_there: Callable[[], bool]) -> bool:
    """Return whether what the first process wrote is there: a network file system may show it late (`SEEN_S`)."""
    deadline_s = time.monotonic() + SEEN_S
    while not is_there():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def failure_of(error: BaseException) -> Failure:
    """Return an error as other processes raise it."""
    if isinstance(error, BadInput):
        return Failure(what="bad_input", message=error.message, key=error.key)
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return Failure(what="interrupted", message=str(error))
    return Failure(what="failed", message=str(error) if isinstance(error, RunFailed) else _named(error))


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_for(failure: Failure | None) -> None:
    if failure is None:
        return
    if failure.what == "bad_input":
        raise BadInput(failure.message, key=failure.key)
    raise Interrupted(failure.message) if failure.what == "interrupted" else RunFailed(failure.message)
