"""The journal of one paper: a trial that was measured is not measured again, and no trial begins after the deadline.

A value is kept with the commit it was measured at, so that a row can say which commits it is of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


class OutOfTime(Exception):
    """The hours are over; what was measured so far is kept."""


class Shelf(Protocol):
    """Where values are kept by key; JSON can write them."""

    def get(self, key: str) -> Any: ...

    def put(self, key: str, value: Any) -> None: ...


class Trials:
    """The trials of one study ("paper.study").

    shelves: where the trials of a study are kept; until: seconds of `clock` after which none begins; commit: of the
    code that runs.
    """

    def __init__(
        self,
        shelves: Callable[[str], Shelf],
        study: str,
        *,
        commit: str,
        until: float,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._shelves, self._study, self._commit = shelves, study, commit
        self._shelf = shelves(study)
        self._until, self._clock, self._tell = until, clock, tell
        self.commits: set[str] = set()  # of what this study used
        self.seconds = 0.0  # that its trials took, whenever that was

    def of(self, study: str) -> Trials:
        """Return the trials of another study of this paper: what it has measured need not be measured again."""
        name = f"{self._study.partition('.')[0]}.{study}"
        given = {"commit": self._commit, "until": self._until, "clock": self._clock, "tell": self._tell}
        other = Trials(self._shelves, name, **given)
        other.commits = self.commits
        return other

    def __call__(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return what `measure` gave, now or before; raise OutOfTime where it would begin too late."""
        place = f"{self._study}/{key}"
        kept = self._shelf.get(key)
        if kept is None:
            if self._clock() >= self._until:
                raise OutOfTime(place)
            began = self._clock()
            value = measure()
            kept = {"value": value, "commit": self._commit, "seconds": round(self._clock() - began, 2)}
            self._shelf.put(key, kept)
            self._tell(f"{place}: {kept['seconds']:.1f} s")
        self.commits.add(kept["commit"])
        self.seconds += kept["seconds"]
        return kept["value"]
