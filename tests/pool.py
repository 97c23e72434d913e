"""A pool of worker processes that have torch imported already, for tests over real process groups.

A job is a function of an importable test module: `job(seat: Seat, **arguments) -> JSON-able`. It runs on ranks
0..n-1 of the pool at once, each with the same store file, and the results come back in rank order.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copied import CopiedCommand
from gossamer.process.starter import may_copy
from gossamer.process.template import Template

HERE = Path(__file__).parent
IMPORTS = ("gossamer.job.worker", "transformers.modeling_utils")  # what most jobs import


@dataclass(frozen=True)
class Seat:
    """A worker's place in a job."""

    rank: int
    ranks: int
    meeting: str  # path of a FileStore
    folder: Path  # scratch space all ranks of the job share

    def store(self):
        import torch.distributed as dist

        return dist.FileStore(self.meeting, self.ranks)


DEADLINE_S = 60.0  # a hang is a failure that shows where: every thread's stack goes to stderr


def hung(worker: subprocess.Popen[str]) -> None:
    """Let a worker show its stacks, and end it."""
    worker.send_signal(signal.SIGUSR1)
    time.sleep(1)
    worker.kill()


class Pool:
    """Workers are started as they are first needed and live until `close`."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._workers: list[subprocess.Popen[str]] = []
        self.broken = False

    def run(self, job: str, ranks: int, /, **arguments: Any) -> list[Any]:
        """Run "module:function" on `ranks` workers. A failing rank's traceback fails the test."""
        answers = self.attempt(job, ranks, **arguments)
        failed = [f"rank {i}:\n{a['error']}" for i, a in enumerate(answers) if "error" in a]
        assert not failed, "\n".join(failed)
        return [a["result"] for a in answers]

    def attempt(self, job: str, ranks: int, /, **arguments: Any) -> list[dict[str, Any]]:
        """As `run`, but failures are answers: {"error": traceback, "kind": class name}."""
        while len(self._workers) < ranks:
            self._workers.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            meeting = os.path.join(folder, "meeting")
            for rank in range(ranks):
                task = {
                    "job": job,
                    "rank": rank,
                    "ranks": ranks,
                    "meeting": meeting,
                    "folder": folder,
                    "arguments": arguments,
                }
                pipe = self._workers[rank].stdin
                assert pipe is not None
                pipe.write(json.dumps(task) + "\n")
                pipe.flush()
            answers = [self._answer(self._workers[rank]) for rank in range(ranks)]
        if self.broken:  # the next job begins with fresh workers
            self.broken = False
            self._end_workers()
        return answers

    def close(self) -> None:
        """End the workers, and what they are copied from."""
        self._end_workers()
        if self._template is not None:
            self._template.close()
            self._template = None

    def _end_workers(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        self._workers.clear()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]  # the workers import what the tests do
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
        }
        if not may_copy():
            return subprocess.Popen(
                [sys.executable, str(HERE / "pool.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=HERE.parent,
            )
        if self._template is None:
            sys.__stderr__.flush()
            self._template = Template(("pool", *IMPORTS), env=environment, log=sys.__stderr__.buffer)
            while not self._template.is_ready():
                time.sleep(0.02)
        return CopiedCommand(self._template, [], folder=HERE.parent, env=environment, has_errors=False)

    def _answer(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout is not None
        deadline = threading.Timer(DEADLINE_S, hung, [worker])
        deadline.start()
        try:
            for line in worker.stdout:
                if line.startswith("@answer "):
                    return json.loads(line[len("@answer ") :])
        finally:
            deadline.cancel()
            deadline.join()
        self.broken = True
        return {"error": f"the pool worker died with exit code {worker.wait()}", "kind": "died"}


def serve() -> None:
    """What a worker does: import torch once, then one job per line."""
    import faulthandler

    import torch

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        seat = Seat(task["rank"], task["ranks"], task["meeting"], Path(task["folder"]))
        module, _, function = task["job"].partition(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), function)(seat, **task["arguments"])}
        except BaseException as error:
            answer = {"error": traceback.format_exc(), "kind": type(error).__name__}
        print("@answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
