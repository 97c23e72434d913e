"""What a supervisor knows of a rank, and who is to blame when nothing moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

WAITING = ("exchange", "agree", "meet", "wait")  # phases in which a rank may stand still because of another one
_SAVING, _SAVE_S = "save", 660.0  # a slow disk is no fault: a save gives up by itself after ten minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Last known of one rank. All times are readings of the supervisor's own monotonic clock."""

    rank: int
    pid: int = 0
    step: int = -1
    phase: str = "start"
    op: str = ""
    sequence: int = -1
    heard_s: float  # when the last beat came
    progress_s: float  # when the rank last moved
    first_step: int = -1  # the first step of its process
    longest_s: float = 0.0  # longest time it stood still since its first step, and moved on
    finished: bool = False  # it said goodbye, or has ended
    waits: bool = False  # it can do nothing until another rank does something
    place: str = ""  # the last line of the user's code that it is in

    @property
    def is_stepping(self) -> bool:
        """The first step is done: compilation and warm-up are over."""
        return self.first_step >= 0 and self.step > self.first_step

    @property
    def is_waiting(self) -> bool:
        """It stands still because of another one."""
        return self.waits or self.phase in WAITING

    def allowed_s(self, after_s: float, patience: float) -> float:
        """How long it may stand still: slow steps are no alarm."""
        return max(after_s, patience * self.longest_s)

    def later(self, pause_s: float, now_s: float) -> Liveness:
        """The same after a pause of the supervisor itself, which is nobody's silence."""
        return replace(
            self, heard_s=min(self.heard_s + pause_s, now_s), progress_s=min(self.progress_s + pause_s, now_s)
        )

    def beaten(self, beat: Mapping[str, int | float | str], now_s: float) -> Liveness:
        """The same after a beat that arrived at `now_s`."""
        return replace(
            self,
            step=int(beat["step"]),
            phase=str(beat["phase"]),
            op=str(beat["op"]),
            sequence=int(beat["sequence"]),
            heard_s=now_s,
            progress_s=now_s - max(0.0, float(beat["progress_age_s"])),
            first_step=int(beat["first_step"]),
            longest_s=float(beat["longest_s"]),
            waits=bool(beat["waits"]),
            place=str(beat["place"]),
        )


def stalled(pulses: Iterable[Liveness], now_s: float, *, after_s: float, patience: float = 0.0) -> list[Liveness]:
    """The ranks that hold others up, and have not moved for `after_s`; the first of them before those that followed.

    A rank that waits stands still as long as the one it waits for, so age alone blames the innocent: where some wait,
    and have waited for `after_s`, it is those that do not. `patience` times the longest pause a rank has made so far is
    allowed too, so that slow steps are no alarm. Where nobody waits, or all do, it is the one furthest behind in (step,
    sequence), but not before the first step is done: a model compiles as long as it takes.
    """
    running = [p for p in pulses if not p.finished]
    held = [p for p in running if p.is_waiting and now_s - p.progress_s > after_s]
    busy = [p for p in running if not p.is_waiting]
    if held and busy:
        # one that is steps ahead has sent what they wait for
        suspects = [p for p in busy if p.step <= max(h.step for h in held)]
        if suspects:
            return _in_order(p for p in suspects if now_s - p.progress_s > p.allowed_s(after_s, patience))
    if not all(p.is_stepping for p in running) or (busy and not held and len(busy) < len(running)):
        return []
    furthest_behind = min(((p.step, p.sequence) for p in running), default=(0, 0))
    last = [p for p in running if (p.step, p.sequence) == furthest_behind]
    still = [p for p in last if now_s - p.progress_s > _alone_s(p, after_s, patience)]
    return _in_order(still) if len(still) == len(last) else []


def left_standing(pulses: Iterable[Liveness], now_s: float, *, after_s: float) -> list[Liveness]:
    """Once others have given up waiting: the rank that has stood still for longest, for `after_s` at least, and waits
    for nobody; and those that have so for half as long."""
    busy = sorted((p for p in pulses if not p.finished and not p.is_waiting), key=lambda p: p.progress_s)
    longest_s = now_s - busy[0].progress_s if busy else 0.0
    return [p for p in busy if now_s - p.progress_s > max(after_s, longest_s / 2)]


def _alone_s(pulse: Liveness, after_s: float, patience: float) -> float:
    """How long a rank may stand still that nobody waits for."""
    allowed_s = pulse.allowed_s(after_s, patience)
    return max(allowed_s, _SAVE_S) if pulse.phase == _SAVING else allowed_s


def _in_order(pulses: Iterable[Liveness]) -> list[Liveness]:
    return sorted(pulses, key=lambda p: (p.step, p.sequence, p.progress_s, p.rank))
