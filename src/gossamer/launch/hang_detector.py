"""Detect hung and slow ranks among the ranks of all hosts; runs on host 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gossamer.launch.control_channel import HostAlive, RankPosition
from gossamer.launch.failure_report import RankFailure
from gossamer.launch.paths import log_file
from gossamer.launch.worker_group import Limits
from gossamer.process import Liveness, Position, left_standing, stalled
from gossamer.spec.units import show_seconds

_PATIENCE = 4.0  # a rank is named when it stands still for so many times its longest pause so far


class HangDetector:
    """A detector of hung and slow ranks that keeps the last position of remote ranks. `hostnames` is in host order."""

    def __init__(self, rundir: Path, hostnames: Sequence[str], limits: Limits) -> None:
        self._rundir, self._hostnames, self._limits = rundir, tuple(hostnames), limits
        self._remote: dict[int, Liveness] = {}
        self._host_of: dict[int, int] = {}
        self._warned: set[tuple[int, int, str, int]] = set()  # rank and position of each warning

    def hear(self, host: int, alive: HostAlive) -> None:
        """Store the rank positions that host `host` has sent."""
        now_s = time.monotonic()
        for standing in alive.standings:
            self._remote[standing.rank] = _pulse(standing, now_s)
            self._host_of[standing.rank] = host

    def judge(self, own: Sequence[Liveness]) -> tuple[list[RankFailure], list[str]]:
        """Return the failures of hung ranks, the first one first, and warnings about slow ranks.

        own: liveness of the ranks of this host.
        """
        now_s, limit_s = time.monotonic(), self._limits.progress_timeout_s
        everyone = [*own, *self._remote.values()]
        hung = stalled(everyone, now_s, after_s=limit_s, patience=_PATIENCE)
        if hung:  # one that hung a little later is no victim
            later = stalled(everyone, now_s, after_s=limit_s / 2, patience=_PATIENCE)
            hung += [pulse for pulse in later if pulse not in hung]
        slow = stalled(everyone, now_s, after_s=self._limits.heartbeat_s, patience=_PATIENCE)
        if not all(p.is_stepping for p in everyone if not p.finished):
            slow = []  # start-up takes unequal times
        failures = [self._failure(pulse, everyone, now_s) for pulse in hung]
        new = [p for p in slow if _spot(p) not in self._warned and not failures]
        self._warned = {_spot(p) for p in slow}
        return failures, [self._slow(pulse, everyone, now_s) for pulse in new]

    def left_standing(self, own: Sequence[Liveness]) -> list[RankFailure]:
        """Return the failures of ranks that make no progress and wait for nobody.

        Call it when other ranks have timed out waiting. own: liveness of the ranks of this host.
        """
        now_s, everyone = time.monotonic(), [*own, *self._remote.values()]
        still = left_standing(everyone, now_s, after_s=self._limits.heartbeat_s)
        return [self._failure(pulse, everyone, now_s) for pulse in still]

    def lost_host(self, host: int) -> RankFailure:
        """Return the failure of a host that is heard no more, with the last position of the rank furthest behind."""
        known = [self._remote[rank].at for rank, where in self._host_of.items() if where == host]
        at = min(known, key=lambda one: (one.step, one.sequence), default=Position())
        name = self._hostnames[host]
        return RankFailure(
            rank=-1,
            host=host,
            hostname=name,
            pid=0,
            what="host lost",
            cause=f"the supervisor on host {name} is gone, or the network to it is cut",
            step=at.step,
            phase=at.phase,
            op=at.op,
            sequence=at.sequence,
        )

    def _failure(self, pulse: Liveness, everyone: Sequence[Liveness], now_s: float) -> RankFailure:
        host = self._host_of.get(pulse.rank, 0)
        return RankFailure(
            rank=pulse.rank,
            host=host,
            hostname=self._hostnames[host],
            pid=pulse.pid,
            what="hung",
            cause=self._standstill(pulse, everyone, now_s) + "; its stacks are at the end of its log",
            step=pulse.at.step,
            phase=pulse.at.phase,
            op=pulse.at.op,
            sequence=pulse.at.sequence,
            place=pulse.place,
            log=str(log_file(self._rundir, pulse.rank)),
        )

    def _slow(self, pulse: Liveness, everyone: Sequence[Liveness], now_s: float) -> str:
        host = self._hostnames[self._host_of.get(pulse.rank, 0)]
        at = f"step {pulse.at.step}, {pulse.at.phase}" + (f", {pulse.at.op}" if pulse.at.op else "")
        return f"rank {pulse.rank} on {host} is slow ({at}): {self._standstill(pulse, everyone, now_s)}"

    def _standstill(self, pulse: Liveness, everyone: Sequence[Liveness], now_s: float) -> str:
        still = f"no progress for {show_seconds(now_s - pulse.progress_s)}, though its heart beats"
        others = [p for p in everyone if p.rank != pulse.rank and not p.finished]
        if pulse.is_waiting:
            return f"{still}: all ranks wait in {pulse.at.phase}; look at the network between the hosts"
        waiting = sorted(p.rank for p in others if p.is_waiting)
        if not waiting:
            return still
        ranks = ", ".join(str(rank) for rank in waiting)
        return f"{still}; " + (f"rank {ranks} waits for it" if len(waiting) == 1 else f"ranks {ranks} wait for it")


def standing_of(pulse: Liveness) -> RankPosition:
    """Return the position of a rank for other hosts: ages in seconds instead of times."""
    return RankPosition(
        rank=pulse.rank,
        pid=pulse.pid,
        step=pulse.at.step,
        phase=pulse.at.phase,
        op=pulse.at.op,
        sequence=pulse.at.sequence,
        first_step=pulse.first_step,
        still_s=max(0.0, time.monotonic() - pulse.progress_s),
        longest_s=pulse.longest_s,
        finished=pulse.finished,
        waits=pulse.waits,
        place=pulse.place,
    )


def _spot(pulse: Liveness) -> tuple[int, int, str, int]:
    return pulse.rank, pulse.at.step, pulse.at.phase, pulse.at.sequence


def _pulse(said: RankPosition, now_s: float) -> Liveness:
    return Liveness(
        rank=said.rank,
        pid=said.pid,
        at=Position(said.step, said.phase, said.op, said.sequence),
        first_step=said.first_step,
        heard_s=now_s,
        progress_s=now_s - said.still_s,
        longest_s=said.longest_s,
        finished=said.finished,
        waits=said.waits,
        place=said.place,
    )
