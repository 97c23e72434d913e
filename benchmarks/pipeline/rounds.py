"""One round: four hosts in the laboratory, one method on them for some steps, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.netlab import Lab, LabTopology
from gossamer.spec.units import read_rate
from pipeline import setting

UNSHAPED = "unshaped"
_HERE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table on every link: ours by the codec of its borders, the peer by its schedule's class."""

    name: str
    schedule: str
    codec: str = ""
    peer: str = ""

    @property
    def boundary(self) -> Any:
        """As a plan writes it."""
        return {"codec": {"codec": self.codec}} if self.codec else "none"


@dataclass(frozen=True, slots=True)
class Length:
    """Steps that count, those before them, sequences per step, and seconds after which all is ended."""

    steps: int
    warm: int
    rows: int
    limit_s: float = 600.0

    @property
    def all(self) -> int:
        return self.warm + self.steps


def measure(method: Method, rate: str, length: Length) -> dict[str, Any]:
    """The figures of a round; `error` where it did not come to its end."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        began = time.monotonic()
        said, codes = _run(_argv(method, length, folder), rate, length)
        seconds = round(time.monotonic() - began, 1)
        if any(codes):
            return {"error": _why(codes, said), "seconds": seconds}
        hosts = [json.loads(next(line for line in reversed(lines) if line.startswith("{"))) for lines in said]
        found = _peer(hosts) if method.peer else _ours(folder / "round", hosts, length)
        return {**found, **_counted(hosts, length), **_timed(found["times_s"], length), "seconds": seconds}


def _argv(method: Method, length: Length, folder: Path) -> list[str]:
    if method.peer:
        return [sys.executable, "-m", "pipeline.peer", method.peer, str(length.all), str(length.rows)]
    config = {
        "model": setting.MODEL,
        "data": setting.DATA,
        "train": {
            "steps": length.all,
            "batch": length.rows,
            "optimizer": {"adamw": setting.ADAMW},
            "lr_schedule": "constant",
            "max_grad_norm": 0.0,
            "accumulate": setting.MICROBATCHES,
            "seed": setting.SEED,
            "evaluate_every": 0,
            "checkpoint_every": 0,
        },
        "machines": {"threads": 1, "timeout_s": 600.0},
        "plan": {
            "mesh": {"pipe": setting.STAGES},
            "cuts": setting.CUTS,
            "pipeline_schedule": method.schedule,
            "activation_compression": method.boundary,
        },
        "run": {"directory": str(folder), "name": "round", "display": "quiet"},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return [sys.executable, "-m", "pipeline.ours", str(folder / "run.yaml")]


def _run(argv: list[str], rate: str, length: Length) -> tuple[list[list[str]], tuple[int, ...]]:
    """What every host said, and how each ended."""
    said: list[list[str]] = [[] for _ in range(setting.STAGES)]
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    shape = {} if rate == UNSHAPED else {"rate_bytes_per_s": read_rate(rate)}
    with Lab(LabTopology(setting.STAGES, **shape)) as lab:
        timer = threading.Timer(length.limit_s, lab.signal, (signal.SIGKILL,))
        timer.start()

        def exited(host: int, code: int) -> None:
            if code:  # the others would wait for it
                lab.signal(signal.SIGTERM)

        try:
            codes = lab.run(argv, env=lambda host: env, output=lambda h, line: said[h].append(line), exited=exited)
        finally:
            timer.cancel()
    return said, codes


def _why(codes: tuple[int, ...], said: list[list[str]]) -> str:
    host = next(h for h, code in enumerate(codes) if code and code != -signal.SIGTERM)
    telling = [line for line in said[host] if "Error" in line] or [line for line in said[host] if line.strip()]
    return f"host {host} ended with {codes[host]}: {telling[-1][:400] if telling else 'it said nothing'}"


def _peer(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "times_s": [step["time_s"] for step in hosts[0]["steps"]],
        "losses": [step["loss"] for step in hosts[-1]["steps"]],
        "version": hosts[0]["version"],
    }


def _ours(run: Path, hosts: list[dict[str, Any]], length: Length) -> dict[str, Any]:
    """Out of the run's own records and plan; the bytes of the other ranks are those they metered."""
    import yaml

    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    forecast = plan["forecast"]["wire_bytes"]
    metered = [{k: n for host in hosts for k, n in host["steps"][i]["wire_bytes"].items()} for i in range(length.all)]
    return {
        "times_s": [step["time_s"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "compute_s": median(step["compute_s"] for step in steps[length.warm :]),
        "wire_bytes": sum(metered[-1].values()),
        "forecast_bytes": sum(forecast.values()),
        # Votes go round all ranks; from the last to the first nothing else does, and between others as much.
        "agreement_bytes": setting.STAGES * forecast[f"{setting.STAGES - 1}>0"],
        "metered_equals_forecast": all(links == forecast for links in metered),
    }


def _counted(hosts: list[dict[str, Any]], length: Length) -> dict[str, Any]:
    """Per step and of all hosts: bytes as the interfaces count them, payload and headers, and processor seconds."""
    ends = [(host["steps"][length.warm - 1], host["steps"][-1]) for host in hosts]
    sums = {name: sum(last[name] - first[name] for first, last in ends) for name in ("interface_bytes", "cpu_s")}
    return {"interface_bytes": round(sums["interface_bytes"] / length.steps), "cpu_s": sums["cpu_s"] / length.steps}


def _timed(times_s: list[float], length: Length) -> dict[str, Any]:
    """A step lasts from the end of the one before, on the first host, until its own."""
    each = [b - a for a, b in pairwise(times_s)][length.warm - 1 :]
    return {"step_s": median(each), "steps_s": [round(t, 4) for t in each]}
