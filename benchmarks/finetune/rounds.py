"""Timed rounds in a laboratory of hosts with one core each: ours by the command line, peft by `finetune.peer`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from finetune import setting
from gossamer.netlab import Lab, LabTopology
from gossamer.spec.units import read_rate

_HERE = Path(__file__).parent.parent
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Row:
    """What is timed: a method by us (`peer` "") or by a peer, on so many hosts.

    apart: the hosts train alone, at the same time: what two hosts of one machine cost each other without a line.
    """

    method: str
    hosts: int = 1
    peer: str = ""
    apart: bool = False

    @property
    def exchange(self) -> str:
        """What gradients cross the line by: adapters as they are, all weights as `auto` finds best."""
        if self.hosts == 1 or self.apart:
            return "none"
        return "auto" if self.method == "full" else "dense"


def measure(row: Row, folder: Path, *, steps: int, warm: int) -> dict[str, Any]:
    """Return the seconds of the timed steps, the largest memory of a host, and the bytes that rank 0 sent per step.

    Raises RuntimeError with the last words of a host that failed.
    """
    if row.apart:
        alone = replace(row, hosts=1, apart=False)
        with ThreadPoolExecutor(row.hosts) as pool:
            found = [*pool.map(lambda _: measure(alone, folder, steps=steps, warm=warm), range(row.hosts))]
        return max(found, key=lambda one: one["step_s"])
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        argv = _peer_argv(row, folder, steps, warm) if row.peer else _argv(row, folder, place, steps + warm)
        said: list[list[str]] = [[] for _ in range(row.hosts)]
        topology = LabTopology(row.hosts, rate_bytes_per_s=read_rate(setting.RATE)) if row.hosts > 1 else LabTopology(1)
        path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"}
        with Lab(topology) as lab:
            timer = threading.Timer(_LIMIT_S, lab.signal, (signal.SIGKILL,))
            timer.start()
            try:
                codes = lab.run(argv, env=lambda host: env, output=lambda h, line: said[h].append(line))
            finally:
                timer.cancel()
        if any(codes):
            host = next(h for h, code in enumerate(codes) if code)
            raise RuntimeError(f"{row}: host {host} ended with {codes[host]}: {' '.join(said[host][-12:])}")
        return _peers(said) if row.peer else _ours(place, steps, warm)


def _argv(row: Row, folder: Path, place: Path, steps: int) -> list[str]:
    config = {
        "model": setting.model_section(folder, row.method),
        "data": setting.data_section(folder),
        "train": setting.train_section(row.method, hosts=row.hosts, steps=steps),
        "machines": {"threads": 1, "timeout_s": 600.0},
        "plan": {"exchange": "dense" if row.exchange == "none" else row.exchange, "lossy": row.exchange == "auto"},
        "run": {"directory": str(place), "name": "round", "display": "quiet"},
    }
    (place / "run.yaml").write_text(json.dumps(config))
    return [sys.executable, "-m", "gossamer", "train", str(place / "run.yaml")]


def _peer_argv(row: Row, folder: Path, steps: int, warm: int) -> list[str]:
    return [sys.executable, "-m", "finetune.peer", str(folder), row.method, str(steps), str(warm)]


def _ours(place: Path, steps: int, warm: int) -> dict[str, Any]:
    """Return the figures in the run's own records; a step lasts until the next one's record."""
    (run,) = place.glob("*round")
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    found = [one for one in lines if one["kind"] == "step"]
    times = [b["time_s"] - a["time_s"] for a, b in pairwise(found)][warm - 1 :]
    timed = found[warm:]
    assert len(times) == len(timed) == steps
    return {
        "steps_s": [round(one, 4) for one in times],
        "step_s": median(times),
        "peak_bytes": max(one["peak_bytes"] for one in timed),
        "sent_bytes": sum(sum(one["wire_bytes"].values()) for one in timed) / len(timed),
        "loss": timed[-1]["loss"],
    }


def _peers(said: list[list[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(line for line in reversed(said[0]) if line.startswith("{")))
    return found
