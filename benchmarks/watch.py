"""What `gossamer watch` costs a run: the part of a core that it takes while a run records ten steps per second.

    python benchmarks/watch.py [--seconds 60] [--json]

A process writes plausible records into a run directory at that rate; `gossamer watch` follows them on a
pseudo-terminal of 120 x 40. Counted is the processor time of `watch` (user and system) in a window that begins once
it has drawn for five seconds, for each of its panes. The start, which imports textual, is given apart.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result import publish

PER_S = 10
WARM_S = 5.0
TARGETS = {"watch_share": 0.01}
KEYS = {"Run": b"1", "Ranks": b"2", "Events": b"5"}
HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, for each pane")
    parser.add_argument("--json", action="store_true", help="print the figures, write no result")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        over = threading.Event()
        writer = threading.Thread(target=write, args=(Path(folder), over, plausible(10**7)))
        writer.start()
        try:
            shares, start_s = follow(Path(folder), asked.seconds)
        finally:
            over.set()
            writer.join()
    figures = {
        "watch_share": round(max(shares.values()), 5),
        "panes": {name: round(share, 5) for name, share in shares.items()},
        "start_cpu_s": round(start_s, 2),
        "records_per_s": PER_S,
        "seconds": asked.seconds,
        "targets": TARGETS,
    }
    if asked.json:
        print(json.dumps(figures))
    else:
        publish("watch", figures)


def plausible(steps: int) -> Iterator[Any]:
    """Return the records of a run as the tests make them. `benchmarks/view` hides the package of tests by its name."""
    spec = importlib.util.spec_from_file_location("streams", HERE.parent / "tests" / "view" / "streams.py")
    assert spec is not None and spec.loader is not None
    streams = importlib.util.module_from_spec(spec)
    sys.modules["streams"] = streams  # its dataclasses look their module up
    spec.loader.exec_module(streams)
    return iter(streams.run(steps))


def write(folder: Path, over: threading.Event, stream: Iterator[Any]) -> None:
    """Append the records of `stream`, ten per second, until `over`."""
    from gossamer.view.run_directory import RunDirectory

    directory, due_s = RunDirectory(folder), time.monotonic()
    for record in stream:
        directory.append(record)
        due_s += 1 / PER_S
        if over.wait(max(0.0, due_s - time.monotonic())):
            return


def follow(folder: Path, seconds: float) -> tuple[dict[str, float], float]:
    """Return the part of a core that `watch` takes in each pane, and the processor seconds until it is drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    argv = [sys.executable, "-m", "gossamer", "watch", str(folder)]
    watch = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    drain = threading.Thread(target=drained, args=(ours,), daemon=True)
    drain.start()
    try:
        time.sleep(WARM_S)
        start_s, shares = cpu_s(watch.pid), {}
        for name, key in KEYS.items():
            os.write(ours, key)
            time.sleep(WARM_S)
            assert watch.poll() is None, "watch has ended"
            began_s, before_s = time.monotonic(), cpu_s(watch.pid)
            time.sleep(seconds)
            shares[name] = (cpu_s(watch.pid) - before_s) / (time.monotonic() - began_s)
        os.write(ours, b"q")
        assert watch.wait(timeout=20) == 0
    finally:
        watch.kill()
        watch.wait()
    return shares, start_s


def drained(terminal: int) -> None:
    """Read what the terminal is sent, as a terminal would."""
    while True:
        try:
            if not os.read(terminal, 65536):
                return
        except OSError:
            return


def cpu_s(process: int) -> float:
    """Return the processor seconds of a process so far: its threads, in nanoseconds, from the scheduler."""
    total = 0
    for thread in Path(f"/proc/{process}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


if __name__ == "__main__":
    main()
