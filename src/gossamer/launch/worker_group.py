"""The workers of one host: start, monitor, terminate and reap them. Failures are `RankFailure` values."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.launch.control_channel import How
from gossamer.launch.failure_report import RankFailure, What, cause_of_exit
from gossamer.launch.paths import errors_folder
from gossamer.process import (
    DONE,
    FAILED,
    INTERRUPTED,
    Command,
    EventLoop,
    HeartbeatServer,
    Liveness,
    OrphanReaper,
    Worker,
    exit_text,
    read_error,
    starter_of,
)
from gossamer.process.out_of_memory import memory_events
from gossamer.process.stack_request import StackRequest
from gossamer.spec.units import show_gib, show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The time limits of a supervisor, in seconds.

    `heartbeat_s`: a rank without a heartbeat for so long is reported; `progress_timeout_s`: a rank without progress
    that others wait for has failed; `grace_s`: to save a checkpoint and stop, and for a process to end after its work;
    `settle_s`: for peers of a failed rank to report their own errors; `kill_s`: from SIGTERM to SIGKILL.
    """

    heartbeat_s: float = 5.0
    progress_timeout_s: float = 150.0
    grace_s: float = 60.0
    settle_s: float = 1.5
    kill_s: float = 3.0


class WorkerGroup:
    """The workers of one host, from start to reaping. A context manager: its exit kills and reaps those that remain."""

    def __init__(
        self, loop: EventLoop, server: HeartbeatServer, *, host: int, hostname: str, rundir: Path, limits: Limits
    ) -> None:
        self._loop, self._server, self._limits = loop, server, limits
        self._host, self._hostname, self._errors = host, hostname, errors_folder(rundir)
        self._warden = OrphanReaper()
        self._workers: dict[int, Worker] = {}
        self._suspects: dict[int, int] = {}  # rank -> judgments in a row that found it stopped
        self._named: set[int] = set()  # ranks whose failure is already out
        self._stacks: dict[int, StackRequest] = {}  # of ranks that hang, are silent, or outstay their work
        self._left: set[int] = set()  # ranks that had ended their work by themselves when their process ended
        self._ended_by_us = False

    def start(self, jobs: Sequence[Command], *, imports: Sequence[str], may_wait: Callable[[], bool]) -> None:
        """Start one worker per command.

        imports: modules that they import beside their program, to be imported once for all. may_wait: called again and
        again meanwhile; where it says no, each worker imports for itself.
        """
        starter = starter_of(jobs, imports)
        try:
            while not starter.is_ready() and may_wait():
                pass
            for job in jobs:
                self._workers[job.rank] = Worker(job, starter=starter, loop=self._loop, warden=self._warden)
        finally:
            starter.close()
        self._memory = {rank: memory_events(worker.pid) for rank, worker in self._workers.items()}

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers.values():
            worker.kill()
        while not self.is_over:
            self._loop.turn(0.02)
            self.reap(stop="now")
        self._warden.close()

    @property
    def is_over(self) -> bool:
        return not any(worker.runs for worker in self._workers.values())

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return tuple(self._code(worker) for worker in self._workers.values() if not worker.runs)

    @property
    def sealed(self) -> int | None:
        """Exit code of the whole run, where a worker here has recorded that everything is saved; None: not yet."""
        return next((w.word.code for w in self._workers.values() if w.word.for_all), None)

    @property
    def pulses(self) -> tuple[Liveness, ...]:
        return tuple(self._server.pulses.values())

    def owns(self, rank: int) -> bool:
        """Return whether `rank` runs on this host."""
        return rank in self._workers

    def forgive(self, pause_s: float) -> None:
        """Do not count a pause of this supervisor of `pause_s` seconds as silence of its ranks."""
        self._server.forgive(pause_s)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to all workers: save a checkpoint and stop."""
        for worker in self._workers.values():
            worker.signal(signal.SIGTERM)

    def end(self) -> None:
        """Terminate all workers after a failure: SIGTERM, or SIGKILL for stopped processes, which cannot handle it."""
        self._ended_by_us = True
        for worker in self._workers.values():
            if worker.state() == "T":
                worker.kill()
            worker.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all workers and their process groups."""
        for worker in self._workers.values():
            worker.kill()

    def accuse(self, rank: int) -> None:
        """Mark the failure of `rank` (hung or silent) as reported.

        The rank writes its stacks into its log before it is terminated.
        """
        self._named.add(rank)
        self._stacks[rank] = StackRequest(self._workers[rank])

    def reap(self, *, stop: How | None) -> list[RankFailure]:
        """Return the failures of the workers that ended since the last call.

        stop: the stop request in force ("save" or "now"), None for none.
        """
        for request in self._stacks.values():
            request.go_on()
        failures: list[RankFailure] = []
        for rank, worker in self._workers.items():
            if not worker.runs or worker.poll() is None:
                continue
            if self._server.pulses[rank].finished and worker.is_at_end:
                self._left.add(rank)
            self._server.finish(rank)
            # asked to stop before its handler stood, or killed because it took too long
            code = self._code(worker)
            excused = stop == "now" or (stop is not None and code in (-signal.SIGTERM, -signal.SIGKILL))
            if rank not in self._named and code not in (DONE, INTERRUPTED) and not excused:
                failures.append(self._exited(rank, worker))
        return failures

    def judge(self) -> tuple[list[RankFailure], list[str]]:
        """Return the failures of stopped and silent ranks, and warnings about ranks that may still recover.

        A process that still runs `grace_s` after its work is killed: what its work ended with counts.
        """
        failures: list[RankFailure] = []
        warnings: list[str] = []
        now_s = time.monotonic()
        for rank, worker in self._workers.items():
            pulse = self._server.pulses[rank]
            silent_s = now_s - pulse.heard_s
            if not worker.runs or rank in self._named or silent_s < self._limits.heartbeat_s:
                self._suspects.pop(rank, None)
                continue
            state = worker.state()
            seen = self._suspects[rank] = self._suspects.get(rank, 0) + 1
            if state == "T" and seen > 1:
                cause = f"stopped by a signal (SIGSTOP): no heartbeat for {show_seconds(silent_s)}"
                failures.append(self._failure(rank, "stopped", cause))
                worker.kill()
            elif pulse.finished and worker.is_at_end and silent_s > self._limits.grace_s:
                warnings += self._end_outstayed(rank, worker)
            elif pulse.pid and not pulse.finished and silent_s > self._limits.progress_timeout_s:
                failures.append(self._failure(rank, "silent", _silence(silent_s, state)))
            elif pulse.pid and not pulse.finished and seen == 1 and state != "T":
                warnings.append(f"rank {rank} on {self._hostname} is silent: {_silence(silent_s, state)}")
        self._named |= {failure.rank for failure in failures}
        return failures, warnings

    def _end_outstayed(self, rank: int, worker: Worker) -> list[str]:
        """Ask a process that runs on after its work for its stacks, and kill it later; return warnings."""
        if rank in self._stacks:
            if self._stacks[rank].is_over:
                worker.kill()
            return []
        self._stacks[rank] = StackRequest(worker)
        return [
            f"rank {rank} on {self._hostname} has ended its work ({exit_text(worker.word.code)}), but its process runs "
            f"{show_seconds(self._limits.grace_s)} later, most likely as a thread of it does not end: it is killed, "
            f"and its work counts; the stacks of its threads are at the end of {worker.log}"
        ]

    def _exited(self, rank: int, worker: Worker) -> RankFailure:
        assert worker.exit_code is not None
        if worker.is_silent:
            return self._silent(rank, worker)
        report = read_error(self._errors, rank, pid=worker.pid)
        said = f"{report.kind}: {report.message}" if report else worker.word.why or worker.last_line()
        kind, _, message = worker.word.why.partition(": ")
        cause = cause_of_exit(
            self._code(worker), said=said, out_of_memory=self._killed(rank), peak=show_gib(worker.peak_bytes)
        )
        return self._failure(rank, "exited", cause).model_copy(
            update={
                "exit_code": self._code(worker),
                "kind": report.kind if report else kind,
                "message": report.message if report else message or said,
                "place": report.place if report else "",
                "by_us": self._ended_by_us
                and rank not in self._left
                and (worker.exit_code < 0 or (report is None and not kind)),
            }
        )

    def _silent(self, rank: int, worker: Worker) -> RankFailure:
        position = worker.last_position()
        at = f"step {position.step}, {position.phase}" if position.step >= 0 else f"phase {position.phase}"
        cause = (
            f"ended without an error message at {at}: {exit_text(worker.exit_code or 0)} before its work was done\n"
            "some code in the process ended it, e.g. os._exit in the model, the data or a library"
        )
        return self._failure(rank, "exited", cause).model_copy(update={"exit_code": FAILED, "message": cause})

    def _killed(self, rank: int) -> str:
        events = self._memory[rank]
        if not events.killed_since():
            return ""
        limit = f" with a limit of {show_gib(events.limit_bytes)}" if events.limit_bytes else ""
        return f"control group {events.file.parent if events.file else ''}{limit}"

    def _code(self, worker: Worker) -> int:
        """Return the exit code of a worker: the recorded one, unless a signal killed it before its work was done.

        A worker that exits without a required record has failed.
        """
        assert worker.exit_code is not None
        said = worker.word.code
        if said in (DONE, INTERRUPTED) or (said >= 0 and (worker.exit_code >= 0 or worker.rank in self._left)):
            return said
        return FAILED if worker.is_silent else worker.exit_code

    def _failure(self, rank: int, what: What, cause: str) -> RankFailure:
        worker = self._workers[rank]
        position = worker.last_position()
        return RankFailure(
            rank=rank,
            host=self._host,
            hostname=self._hostname,
            pid=worker.pid,
            what=what,
            cause=cause,
            step=position.step,
            phase=position.phase,
            op=position.op[:200],
            sequence=position.sequence,
            log=str(worker.log),
        )


def _silence(silent_s: float, state: str) -> str:
    meaning = {
        "D": "waits for a disk or a device",
        "R": "computes without letting any other thread run",
        "S": "sleeps holding the interpreter",
        "t": "is held by a debugger",
    }
    said = f"no heartbeat for {show_seconds(silent_s)}"
    return (
        f"{said}, the process {meaning[state]} (state {state})"
        if state in meaning and sys.platform != "win32"
        else said
    )
