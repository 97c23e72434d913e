"""The line of an agreement among ranks that a launcher started: keys of the store of their rendezvous."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gossamer.launch.agreement import WORD, Line, Word
from gossamer.process.json_lines import read_line
from gossamer.spec.errors import PeerLost

_POLL_S = 0.05
_LEAVE_S = 5.0  # for the others to hear why the first ends


class KeyStore(Protocol):
    """What is needed of torch's Store."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""


@dataclass(slots=True)
class RankStore(Line):
    """The line of rank `rank` of `ranks`; every word is a key of its own in a store that the ranks share.

    `timeout_s`: how long a word may take. `when` the ranks agree, for errors.
    """

    store: KeyStore
    rank: int
    ranks: int
    timeout_s: float = math.inf
    when: str = "between phases"
    _told: int = 0
    _heard: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def tell(self, word: Word) -> None:
        try:
            self.store.set(f"{self.rank}/{self._told}", word.model_dump_json())
        except RuntimeError as error:
            if word.failure is None:  # else the failure is what to say
                raise self._lost(error) from None
        self._told += 1

    def heard(self) -> list[Word]:
        speakers = range(1, self.ranks) if self.is_first else range(1)
        found = [self._wait(speaker) for speaker in speakers]
        self._heard += 1
        return found

    def leave(self) -> None:
        """Say that this process hears no more; on the first, which may hold the store, wait for the others' word."""
        with suppress(RuntimeError):
            self.store.set(f"{self.rank}/left", "")
            if not self.is_first:
                return
            deadline_s = time.monotonic() + _LEAVE_S
            left = [f"{rank}/left" for rank in range(1, self.ranks)]
            while not self.store.check(left) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)

    def _wait(self, speaker: int) -> Word:
        key, is_gone = f"{speaker}/{self._heard}", False
        deadline_s = time.monotonic() + self.timeout_s
        try:
            while not self.store.check([key]):
                if is_gone:
                    raise PeerLost(f"rank {speaker} ended {self.when}: see its message")
                if time.monotonic() > deadline_s:
                    raise PeerLost(
                        f"no word of rank {speaker} {self.when} within {self.timeout_s:g} s: check that it has started"
                    )
                is_gone = self.store.check([f"{speaker}/left"])  # it may have spoken just before
                time.sleep(_POLL_S)
            found = self.store.get(key)
        except PeerLost:
            raise
        except RuntimeError as error:  # the process that holds the store is gone
            raise self._lost(error) from None
        return read_line(found, WORD)

    def _lost(self, error: RuntimeError) -> PeerLost:
        said = str(error).strip().splitlines()
        return PeerLost(f"the store of the ranks is gone {self.when}: {said[0] if said else 'no answer'}")
