"""The liveness of ranks as a supervisor knows it, and the choice of hung ranks when nothing progresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gossamer.process.last_position import Position

WAITING = ("exchange", "agree", "meet", "wait")  # phases in which a rank may wait for another one
_SAVING, _SAVE_S = "save", 660.0  # a slow disk is no fault: a save gives up by itself after ten minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The last known state of one rank. All times are readings of the supervisor's own monotonic clock."""

    rank: int
    pid: int = 0
    at: Position = field(default_factory=Position)
    heard_s: float  # when the last beat came
    progress_s: float  # when the rank last moved
    first_step: int = -1  # the first step of its process
    longest_s: float = 0.0  # longest pause since its first step that ended in progress
    finished: bool = False  # it said goodbye, or has ended
    waits: bool = False  # it can do nothing until another rank does something
    place: str = ""  # the last line of the user's code that it is in

    @property
    def is_stepping(self) -> bool:
        """Whether the rank has finished its first step: compilation and warm-up are over."""
        return self.first_step >= 0 and self.at.step > self.first_step

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is in a phase in which it waits for another rank."""
        return self.waits or self.at.phase in WAITING

    def allowed_s(self, after_s: float, patience: float) -> float:
        """Return for how many seconds the rank may make no progress.

        The limit is `after_s`, or `patience` times the rank's longest pause so far if that is more: slow steps are no
        hang.
        """
        return max(after_s, patience * self.longest_s)

    def later(self, pause_s: float, now_s: float) -> Liveness:
        """Return a copy after a pause of the supervisor itself of `pause_s` seconds.

        The pause counts neither as silence nor as lack of progress.
        """
        return replace(
            self, heard_s=min(self.heard_s + pause_s, now_s), progress_s=min(self.progress_s + pause_s, now_s)
        )

    def beaten(self, beat: Mapping[str, int | float | str], now_s: float) -> Liveness:
        """Return a copy updated by a heartbeat that arrived at `now_s`."""
        return replace(
            self,
            at=Position(int(beat["step"]), str(beat["phase"]), str(beat["op"]), int(beat["sequence"])),
            heard_s=now_s,
            progress_s=now_s - max(0.0, float(beat["progress_age_s"])),
            first_step=int(beat["first_step"]),
            longest_s=float(beat["longest_s"]),
            waits=bool(beat["waits"]),
            place=str(beat["place"]),
        )


def stalled(pulses: Iterable[Liveness], now_s: float, *, after_s: float, patience: float = 0.0) -> list[Liveness]:
    """Return the hung ranks: those that block others and made no progress for `after_s` seconds, furthest behind first.

    A rank that waits makes no progress as long as the rank it waits for, so age alone would name the wrong one. Where
    some ranks have waited for `after_s`, the hung ranks are among those that do not wait. A rank may also pause
    `patience` times its longest pause so far, so that slow steps are no hang.

    Where no rank waits, or all do, the hung rank is the one furthest behind in (step, sequence). This holds only once
    every rank has finished its first step: a model compiles as long as it takes.
    """
    running = [p for p in pulses if not p.finished]
    held = [p for p in running if p.is_waiting and now_s - p.progress_s > after_s]
    busy = [p for p in running if not p.is_waiting]
    if held and busy:
        # a rank that is steps ahead has already sent what the others wait for
        suspects = [p for p in busy if p.at.step <= max(h.at.step for h in held)]
        if suspects:
            return _in_order(p for p in suspects if now_s - p.progress_s > p.allowed_s(after_s, patience))
    if not all(p.is_stepping for p in running) or (busy and not held and len(busy) < len(running)):
        return []
    furthest_behind = min(((p.at.step, p.at.sequence) for p in running), default=(0, 0))
    last = [p for p in running if (p.at.step, p.at.sequence) == furthest_behind]
    still = [p for p in last if now_s - p.progress_s > _alone_s(p, after_s, patience)]
    return _in_order(still) if len(still) == len(last) else []


def left_standing(pulses: Iterable[Liveness], now_s: float, *, after_s: float) -> list[Liveness]:
    """Return the hung ranks once other ranks have timed out waiting.

    These are the rank that waits for nobody and has made no progress for longest, `after_s` seconds at least, and those
    without progress for half as long.
    """
    busy = sorted((p for p in pulses if not p.finished and not p.is_waiting), key=lambda p: p.progress_s)
    longest_s = now_s - busy[0].progress_s if busy else 0.0
    return [p for p in busy if now_s - p.progress_s > max(after_s, longest_s / 2)]


def _alone_s(pulse: Liveness, after_s: float, patience: float) -> float:
    """Return for how many seconds a rank that no other waits for may make no progress."""
    allowed_s = pulse.allowed_s(after_s, patience)
    return max(allowed_s, _SAVE_S) if pulse.at.phase == _SAVING else allowed_s


def _in_order(pulses: Iterable[Liveness]) -> list[Liveness]:
    return sorted(pulses, key=lambda p: (p.at.step, p.at.sequence, p.progress_s, p.rank))
