"""Work of many judges: each in a forked process of its own group, some at a time, rows as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Thing = TypeVar("Thing")
Row = dict[str, Any]


def judged(
    things: Sequence[Thing], by: Callable[[Thing], Row], *, otherwise: Callable[[Thing, str], Row], jobs: int
) -> Iterator[Row]:
    """The row of each thing by `by`, of which `jobs` run at a time; `otherwise` makes one where a judge broke, of what
    it said.
    """
    fork, waiting = multiprocessing.get_context("fork"), list(reversed(things))
    live: dict[Connection, tuple[Thing, Any]] = {}
    try:
        while waiting or live:
            while waiting and len(live) < jobs:
                thing = waiting.pop()
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_work, args=(thing, by, otherwise, theirs))
                process.start()
                theirs.close()
                live[ours] = (thing, process)
            for pipe in wait(list(live)):
                assert isinstance(pipe, Connection)
                thing, process = live[pipe]
                try:
                    row = dict(pipe.recv())
                except EOFError:
                    row = otherwise(thing, "its judge ended without a word")
                yield row
                del live[pipe]
                _end(process)
                pipe.close()
    finally:
        for _, process in live.values():
            _end(process)


def _work(thing: Any, by: Callable[[Any], Row], otherwise: Callable[[Any, str], Row], pipe: Connection) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        pipe.send(by(thing))
    except BaseException:
        pipe.send(otherwise(thing, traceback.format_exc()))


def _end(process: Any) -> None:
    """It, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
