"""The processes of a sweep's trials: `gossamer train` for each, a few at a time; Ctrl-C stops them with checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.trial import Trial, TrialResult
from gossamer.process.template import tied
from gossamer.spec.errors import Interrupted

_POLL_S = 0.1
_INTERRUPTED = 4  # exit code of a run that was stopped and has a checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one sweep, `jobs` at a time. `processes`: of one trial, among which it shares the cores."""

    folder: SweepFolder
    config: Path  # as kept in the folder
    jobs: int
    processes: int

    def run(self, trials: Sequence[Trial], ended: Callable[[Trial, TrialResult], None]) -> None:
        """Run the trials in order, and pass each result to `ended`; a failed trial stops no other.

        Raises Interrupted after SIGINT, SIGTERM or SIGHUP, once every running trial has saved a checkpoint and ended.
        """
        waiting, running = list(trials), dict[Trial, subprocess.Popen[bytes]]()
        try:
            with _as_interrupt(signal.SIGTERM, signal.SIGHUP):
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        trial = waiting.pop(0)
                        running[trial] = self._start(trial)
                    for trial in [one for one, process in running.items() if process.poll() is not None]:
                        ended(trial, self._result(trial, running.pop(trial).returncode))
                    if running:
                        time.sleep(_POLL_S)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(running)} of the trials were running, {len(waiting)} had not begun; what is done is kept in "
                f"{self.folder.path}: the same command goes on"
            ) from None
        finally:
            _stop(list(running.values()))

    def _start(self, trial: Trial) -> subprocess.Popen[bytes]:
        runs, log = self.folder.runs_of(trial), self.folder.log_of(trial)
        runs.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "gossamer", "train", str(self.config), *trial.arguments]
        command += [f"run.directory={runs}", "run.display=plain", "--json"]
        if any(runs.glob("*/checkpoints/*")):  # an earlier start of the sweep was stopped in this trial
            command += ["--resume", "auto"]
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as errors:
            return subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env={**os.environ, **self._threads()},
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone, which passes it on
            )

    def _threads(self) -> dict[str, str]:
        """Return the variable that shares the cores among trials that run together."""
        if self.jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (self.jobs * self.processes)))}

    def _result(self, trial: Trial, code: int) -> TrialResult:
        """Return what became of a trial, from its exit code and its last line."""
        log = self.folder.log_of(trial)
        answer = _last_object(log)
        if code == 0 and answer is not None:
            return TrialResult.of_summary(trial, answer)
        if answer is not None and "error" in answer:
            error = str(answer["error"])
        else:
            error = f"its process ended with code {code} and no answer: see {log.with_suffix('.err')}"
        if code == _INTERRUPTED:
            error = f"somebody stopped it: {error}"
        return TrialResult(
            trial=trial.name, outcome="failed", directory=_newest(self.folder.runs_of(trial)), error=error
        )


def _last_object(log: Path) -> dict[str, Any] | None:
    """Return the JSON object in the last line of a log; None where the command wrote none."""
    try:
        found = json.loads(log.read_bytes().rstrip().rpartition(b"\n")[2])
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _newest(runs: Path) -> str:
    found = sorted(path for path in runs.iterdir() if path.is_dir())
    return str(found[-1]) if found else ""


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask every process to save and end, and wait; a second Ctrl-C ends them at once."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.send_signal(signal.SIGINT)  # twice: at once
        for process in processes:
            process.wait()


@contextmanager
def _as_interrupt(*numbers: signal.Signals) -> Iterator[None]:
    """Turn signals into KeyboardInterrupt while entered, in the main thread; ignored ones (nohup) stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
