"""What a supervisor knows of a rank, and who is to blame when nothing moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

WAITING = ("exchange", "agree", "meet", "wait")  # phases in which a rank may stand still because of another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
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

    @property
    def is_stepping(self) -> bool:
        """The first step is done: compilation and warm-up are over."""
        return self.first_step >= 0 and self.step > self.first_step

    def later(self, pause_s: float, now_s: float) -> Pulse:
        """The same after a pause of the supervisor itself, which is nobody's silence."""
        return replace(
            self, heard_s=min(self.heard_s + pause_s, now_s), progress_s=min(self.progress_s + pause_s, now_s)
        )

    def beaten(self, beat: dict[str, int | float | str], now_s: float) -> Pulse:
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
        )


def stalled(pulses: Iterable[Pulse], now_s: float, *, after_s: float, patience: float = 0.0) -> list[Pulse]:
    """The ranks that hold all others up: no move for `after_s`, while nobody is behind them who still moves.

    A rank that waits in an exchange stands still as long as the one it waits for, so age alone blames the innocent:
    the culprit is the one furthest behind in (step, sequence), and among equals the one that does not wait.
    `patience` times the longest pause a rank has made so far is allowed too, so that slow steps are no alarm.
    """
    running = [p for p in pulses if not p.finished]
    if not running or not all(p.is_stepping for p in running):
        return []
    furthest_behind = min((p.step, p.sequence) for p in running)
    last = [p for p in running if (p.step, p.sequence) == furthest_behind]
    culprits = [p for p in last if p.phase not in WAITING] or last
    still = [p for p in culprits if now_s - p.progress_s > max(after_s, patience * p.longest_s)]
    return still if len(still) == len(culprits) else []
