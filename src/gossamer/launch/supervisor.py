"""Supervise a run on one host: detect failures, forward stop requests, terminate workers, report the cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gossamer.launch.control_channel import Done, HostAlive, HostLine, How, RankFailed, RunEnded, Stop
from gossamer.launch.failure_report import Dated, RankFailure, RootCause, find_root_cause, format_report
from gossamer.launch.hang_detector import HangDetector, standing_of
from gossamer.launch.paths import lacks_checkpoint
from gossamer.launch.signals import StopRequests
from gossamer.launch.worker_group import Limits, WorkerGroup
from gossamer.process import BAD_INPUT, DONE, FAILED, INTERRUPTED, Command, EventLoop
from gossamer.process.stack_request import STACKS_S
from gossamer.spec.units import show_seconds

_TURN_S = 0.05
_PAUSE_S = 1.0  # a turn that took so much longer means that this process itself was held up
_LOST_PERIODS = 3  # a host unheard for so many heartbeat periods is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run. `exit_code`: 0, 2, 3 or 4; `text`: message for the user.

    `blame`: the root cause, None unless the run failed. `asked_to_stop`: also where it was done just then.
    """

    exit_code: int
    text: str = ""
    blame: RootCause | None = None
    asked_to_stop: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The host of a supervisor, the names of all hosts, and callbacks.

    `say` is called with messages for the user, `tick` about twenty times a second.
    """

    rundir: Path
    host: int
    hostnames: tuple[str, ...]
    say: Callable[[str], None]
    tick: Callable[[], None]


class Supervisor:
    """The supervisor of one run on one host. Construct it, then call `run` once."""

    def __init__(self, site: Site, crew: WorkerGroup, line: HostLine, *, loop: EventLoop, limits: Limits) -> None:
        self._site, self._crew, self._line, self._loop, self._limits = site, crew, line, loop, limits
        self._verdicts = HangDetector(site.rundir, site.hostnames, limits)
        self._failures: list[Dated] = []
        self._stop: How | None = None
        self._ended: RunEnded | None = None
        self._done: dict[int, tuple[int, ...]] = {}  # exit codes of other hosts' workers
        self._lost: set[int] = set()
        self._turned_s = self._judged_s = self._stop_s = self._failed_s = time.monotonic()
        self._is_ending = self._is_reported = False
        self._was_saved = False  # before the first failure

    def run(self, jobs: Sequence[Command], imports: Sequence[str] = ()) -> RunEnd:
        """Start the workers, supervise them until the run is over on all hosts, and return how it ended.

        imports: modules that the workers import beside their program.
        """
        with StopRequests(self._loop) as requests:
            self._crew.start(jobs, imports=imports, may_wait=lambda: self._may_wait(requests))
            while not self._is_over():
                self._loop.turn(_TURN_S)
                self._mind_pauses()
                self._obey(requests.count)
                self._note(self._crew.reap(stop=self._stop))
                self._hear()
                if time.monotonic() - self._judged_s > self._limits.heartbeat_s / 5:
                    self._judge()
                self._act()
                self._site.tick()
        outcome = replace(self._outcome(), asked_to_stop=self._stop is not None)
        self._line.send(RunEnded(exit_code=outcome.exit_code, text=outcome.text))
        return outcome

    def _may_wait(self, requests: StopRequests) -> bool:
        """Do a turn of what goes on before there is a worker; return whether nobody has asked to stop, or failed."""
        self._loop.turn(_TURN_S)
        self._mind_pauses()
        self._hear()
        if time.monotonic() - self._judged_s > self._limits.heartbeat_s / 5:
            self._judge()
        self._site.tick()
        return requests.count == 0 and self._stop is None and self._ended is None and not self._failures

    def _mind_pauses(self) -> None:
        now_s = time.monotonic()
        pause_s = now_s - self._turned_s - _TURN_S
        if pause_s > _PAUSE_S:
            self._crew.forgive(pause_s)
            self._line.forgive(pause_s)
        self._turned_s = now_s

    def _obey(self, requests: int) -> None:
        if requests:
            self._asked("save" if requests == 1 else "now")

    def _asked(self, how: How, *, by: int = -1) -> None:
        """Apply a stop request and forward it, unless it is nothing new."""
        if self._stop in (how, "now"):
            return
        self._stop, self._stop_s = how, time.monotonic()
        self._line.send(Stop(how=how), besides=by)
        if how == "save":
            self._crew.ask_to_stop()  # before it is told: the ranks save whether or not anybody can be told
            grace = show_seconds(self._limits.grace_s)
            self._site.say(f"stopping: saving a checkpoint first, within {grace}; ask once more to stop at once")

    def _note(self, failures: Sequence[RankFailure], *, by: int = -1) -> None:
        """Store failures, and send them to the other hosts."""
        for failure in failures:
            if not self._failures:
                self._failed_s, self._was_saved = time.monotonic(), self._crew.sealed is not None
            self._failures.append(Dated(failure=failure, at_s=time.monotonic() - failure.age_s))
            self._line.send(RankFailed(failure=failure), besides=by)
            if failure.what in ("hung", "silent") and self._crew.owns(failure.rank):
                self._crew.accuse(failure.rank)

    def _hear(self) -> None:
        for host, message in self._line.received():
            if isinstance(message, RankFailed):
                self._note([message.failure], by=host)
            elif isinstance(message, Stop):
                self._asked(message.how, by=host)
            elif isinstance(message, HostAlive):
                self._verdicts.hear(host, message)
            elif isinstance(message, Done):
                self._done[host] = message.exit_codes
            else:
                self._ended = message

    def _judge(self) -> None:
        self._judged_s = time.monotonic()
        failures, warnings = self._crew.judge()
        self._line.send(HostAlive(standings=tuple(standing_of(pulse) for pulse in self._crew.pulses)))
        if self._site.host == 0 and not self._failures and not failures:
            hung, slow = self._verdicts.judge(self._crew.pulses)
            failures, warnings = failures + hung, warnings + slow
        elif self._site.host == 0 and not failures and not self._is_ending and self._gave_up_waiting():
            failures = self._verdicts.left_standing(self._crew.pulses)
        for warning in warnings:
            self._site.say(warning)
        self._note([*failures, *self._lost_hosts()])

    def _gave_up_waiting(self) -> bool:
        """Return whether all failures are ranks that timed out waiting for a rank that is still there."""
        failures = [dated.failure for dated in self._failures]
        return any(f.gave_up_waiting for f in failures) and all(f.is_collateral for f in failures)

    def _lost_hosts(self) -> list[RankFailure]:
        """Return the failures of hosts whose supervisor is lost or silent, each host once."""
        others = range(1, len(self._site.hostnames)) if self._site.host == 0 else range(1)
        failures: list[RankFailure] = []
        for host in others:
            if host in self._lost or host in self._done or self._ended is not None or self._is_there(host):
                continue
            self._lost.add(host)
            failures.append(self._verdicts.lost_host(host))
        return failures

    def _is_there(self, host: int) -> bool:
        """Return whether a host is heard, or the connection to it is open and the ranks of this host still step.

        They wait for the ranks of all hosts. After a cut each connection tries again after pauses that double, so
        messages of a step may come through long before those of a supervisor.
        """
        stepping = [pulse.progress_s for pulse in self._crew.pulses if pulse.is_stepping and not pulse.finished]
        return self._is_heard(host) or (host in self._line.others and self._is_recent(max(stepping, default=0.0)))

    def _is_heard(self, host: int) -> bool:
        """Return whether the connection to a host is open, and a message came lately."""
        return host in self._line.others and self._is_recent(self._line.heard_s[host])

    def _is_recent(self, at_s: float) -> bool:
        return time.monotonic() - at_s < _LOST_PERIODS * self._limits.heartbeat_s

    def _act(self) -> None:
        """Terminate workers where needed: step by step, harder with time."""
        now_s = time.monotonic()
        if self._stop == "now":
            self._crew.kill()
        elif self._failures:
            since_s = now_s - self._failed_s
            settle_s = self._settle_s()
            if since_s > settle_s + self._limits.kill_s:
                self._crew.kill()
            elif since_s > settle_s and not self._is_ending:
                self._is_ending = True
                self._crew.end()
        elif self._stop == "save" and now_s - self._stop_s > self._limits.grace_s:
            if self._crew.sealed is None:  # else a process outstays its work
                grace = show_seconds(self._limits.grace_s)
                self._site.say(f"no checkpoint was saved within {grace}: stopping at once")
            self._asked("now")

    def _settle_s(self) -> float:
        """Return for how many seconds other ranks may still report their own errors."""
        causes = [dated.failure for dated in self._failures if not dated.failure.is_collateral]
        if not causes:
            return 2 * self._limits.settle_s  # the root cause may take longer to be seen
        if causes[0].what in ("hung", "silent"):
            return STACKS_S  # the others wait for it, and have nothing to say
        return self._limits.settle_s

    def _is_over(self) -> bool:
        """Return whether all workers of this host have ended and the other hosts have reported their end."""
        if not self._crew.is_over:
            return False
        if self._site.host > 0:
            if not self._is_reported:
                self._is_reported = True
                self._line.send(Done(exit_codes=self._crew.exit_codes))
            is_complete = self._ended is not None or (0 in self._lost and not self._is_heard(0))
        else:
            is_complete = len(self._lost | set(self._done)) == len(self._site.hostnames) - 1
        limit_s = 2 * (self._limits.settle_s + self._limits.kill_s) + self._site.host + 2
        is_late = bool(self._failures) and time.monotonic() - self._failed_s > limit_s
        return is_complete or is_late

    def _outcome(self) -> RunEnd:
        if self._ended is not None:  # host 0 has the messages of all hosts: its result counts
            return RunEnd(exit_code=self._ended.exit_code, text=self._ended.text)
        resume = f"go on with: gossamer resume {self._site.rundir}"
        saved, is_asked = self._crew.sealed, self._stop is not None
        if saved is not None and (saved == DONE or is_asked or self._was_saved or not self._failures):
            return _ended(saved, resume)  # a rank lost after all was saved changes nothing
        is_own_fault = any(not dated.failure.is_collateral for dated in self._failures)
        if self._failures and self._stop != "now" and (is_own_fault or self._stop is None):
            found = find_root_cause(self._failures)
            if found.first.exit_code == BAD_INPUT:
                return RunEnd(exit_code=BAD_INPUT, text=found.first.message, blame=found)
            return RunEnd(exit_code=FAILED, text=format_report(found, rundir=self._site.rundir), blame=found)
        codes = {*self._crew.exit_codes, *(code for codes in self._done.values() for code in codes)}
        if codes <= {DONE, INTERRUPTED}:
            return _ended(max(codes, default=DONE), resume)
        left = "there is none to go on from" if lacks_checkpoint(self._site.rundir) else resume
        return RunEnd(exit_code=FAILED, text=f"stopped before a new checkpoint was saved; {left}")


def _ended(code: int, resume: str) -> RunEnd:
    """Return the end of a run that is done, or interrupted with a checkpoint."""
    return RunEnd(exit_code=code, text=f"stopped, with a checkpoint; {resume}" if code == INTERRUPTED else "")
