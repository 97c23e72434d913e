"""Find the checkpoint to resume from: one rank per directory reads all files, and all ranks agree on the same step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from gossamer.comm.channel import Channel, gathered
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.store.checkpoint import Checkpoint, latest_good, list_checkpoints, open_checkpoint

# A rank's number in a round, other than the step it has found.
_NOT_ASKED, _NONE, _READING, _FAILED = math.inf, -1.0, -2.0, -3.0


@dataclass(frozen=True, slots=True)
class CheckpointSearch:
    """The search of one rank for the newest checkpoint that is good in every directory.

    `is_reader`: this rank reads on behalf of all ranks that see `directory`. A round is one small all-gather, in which
    every rank takes part until all have found the step. A reader joins a round after every file, so that no rank waits
    longer than one file takes. It also joins when it fails, so that the others stop waiting.
    """

    channel: Channel
    directory: Path
    is_reader: bool

    def run(self, until: int | None = None) -> tuple[Checkpoint, dict[int, str]] | None:
        """Return the newest checkpoint that is good in every directory, and the problems of newer ones here, by step.

        `until`: the newest step to accept; None: any. Returns None if no rank has any checkpoint. Raises BadInput on
        all ranks if a directory has none to offer, CheckpointMismatch on the reader (PeerLost on the others) if all in
        a directory are damaged.
        """
        found: Checkpoint | None = None
        problems: dict[int, str] = {}
        first = True
        while True:
            word = _NOT_ASKED
            if self.is_reader and (found is None or (until is not None and found.step > until)):
                found, more = self._look(until)
                problems |= more
            if self.is_reader:
                word = _NONE if found is None else float(found.step)
            words = self._agreed(word)
            if first and words == {_NONE}:
                return None
            if _NONE in words:
                raise BadInput(self._nothing_common(until))
            if len(words) == 1:
                step = int(words.pop())
                return (open_checkpoint(self.directory, step) if found is None else found), problems
            until, first = int(min(words)), False

    def _look(self, until: int | None) -> tuple[Checkpoint | None, dict[int, str]]:
        if not any(until is None or step <= until for step in list_checkpoints(self.directory)):
            return None, {}
        try:
            return latest_good(self.directory, until=until, beat=self._beat)
        except PeerLost:
            raise
        except Exception:
            self._round(_FAILED)
            raise

    def _beat(self) -> None:
        self._round(_READING)

    def _agreed(self, word: float) -> set[float]:
        """Return the steps that the readers have found, once all have."""
        while _READING in (words := self._round(word)):
            pass
        return {each for each in words if each != _NOT_ASKED}

    def _round(self, word: float) -> list[float]:
        words = [float(each) for each in gathered(self.channel, [word])[:, 0]]
        if _FAILED in words and word != _FAILED:
            raise PeerLost(f"rank {words.index(_FAILED)} could not read its checkpoints: see its error message")
        return words

    def _nothing_common(self, until: int | None) -> str:
        there = ", ".join(map(str, list_checkpoints(self.directory))) or "none"
        upto = "" if until is None else f" of a step up to {until}"
        return (
            f"wanted a good checkpoint{upto} on every host, got none on one host (steps on this host: {there}): "
            "copy the checkpoints of another host to that host, or start a new run"
        )
