"""One round: a laboratory of some hosts and links, one method on it, some steps, and what came of it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from gossamer.netlab import Lab, LabTopology
from gossamer.spec.units import read_rate
from links import setting, venvs
from links.method import Method
from links.turns import HOST

UNSHAPED = "unshaped"
HUNG = "no end after"
_HERE = Path(__file__).parent.parent
_GRACE_S = 20.0  # for the others to end after one has failed


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between the hosts. `delay_ms` is one way."""

    hosts: int
    rate: str = UNSHAPED
    delay_ms: float = 0.0
    islands: tuple[int, ...] = ()
    between: str = ""

    def topology(self) -> LabTopology:
        rates = {"rate_bytes_per_s": self.rate, "between_bytes_per_s": self.between}
        given = {name: read_rate(rate) for name, rate in rates.items() if rate not in ("", UNSHAPED)}
        return LabTopology(self.hosts, delay_s=self.delay_ms / 1000, islands=self.islands, **given)

    def named(self) -> dict[str, Any]:
        """As it stands in a row."""
        return {**asdict(self), "islands": list(self.islands)}


@dataclass(frozen=True, slots=True)
class Length:
    """How long a round is: timed steps, steps before them, and seconds after which it is ended."""

    steps: int
    warm: int
    limit_s: float


def measure(
    method: Method, link: Link, length: Length, *, model: str = setting.GPT2, turns: Sequence[str] = ()
) -> dict[str, Any]:
    """The figures of a round; with `error` and `command` where it did not come to its end.

    `turns`: the arguments of `links.turns`, where it takes turns with other programs.
    """
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        try:
            argv = _argv(method, link, length, folder, model, turns)
        except OSError as error:
            return {"error": f"its environment cannot be made: {error}", "command": f"pip install {method.venv}"}
        said, codes, seconds = _run(argv, link, length)
        try:
            if any(codes):
                raise ValueError(_why(codes, said, seconds, length))
            middle = median if method.period == 1 else mean  # a median would be a step that exchanges nothing
            found = _peer(said) if method.peer else _ours(folder, length, middle, in_turns=bool(turns))
            found["step_s"] = middle(found["steps_s"])
        except (ValueError, KeyError, StopIteration, FileNotFoundError) as error:
            return {"error": str(error), "command": shlex.join(_shown(argv)), "seconds": round(seconds, 1)}
        return {**found, "seconds": round(seconds, 1), "tokens_per_s": setting.tokens(link.hosts) / found["step_s"]}


def _argv(method: Method, link: Link, length: Length, folder: Path, model: str, turns: Sequence[str]) -> list[str]:
    if method.peer:
        steps = (str(length.steps), str(length.warm))
        return [venvs.interpreter(method.venv), "-m", "links.host", method.name, model, *steps, *turns]
    config = {
        "model": setting.MODELS[model],
        "data": setting.DATA,
        "train": {
            # The last one meets once more, where islands train apart.
            "steps": length.steps + length.warm + (not turns),
            "batch": link.hosts * setting.ROWS,
            "optimizer": {"adamw": {"lr": setting.LR, "betas": setting.BETAS, "weight_decay": setting.WEIGHT_DECAY}},
            "lr_schedule": "constant",
            "max_grad_norm": setting.CLIP,
            "seed": setting.SEED,
            "evaluate_every": 0,
            "evaluate_sequences": 1,
            "checkpoint_every": 0,
        },
        "machines": {"threads": 1, "timeout_s": 600.0},
        "plan": method.plan,
        "run": {"directory": str(folder), "name": "round", "display": "quiet"},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    program = ["links.turns", *turns] if turns else ["gossamer"]
    return [sys.executable, "-m", *program, "train", str(folder / "run.yaml")]


def _run(argv: list[str], link: Link, length: Length) -> tuple[list[list[str]], tuple[int, ...], float]:
    """What every host said, how each ended, and how long it took."""
    said: list[list[str]] = [[] for _ in range(link.hosts)]
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"}
    began = time.monotonic()
    with Lab(link.topology()) as lab:
        timers = [threading.Timer(length.limit_s, lab.signal, (signal.SIGKILL,))]
        timers[0].start()

        def exited(host: int, code: int) -> None:
            if code and len(timers) == 1:
                timers.append(threading.Timer(_GRACE_S, lab.signal, (signal.SIGKILL,)))
                timers[1].start()

        try:
            codes = lab.run(
                argv,
                env=lambda host: {**env, HOST: str(host)},
                output=lambda h, line: said[h].append(line),
                exited=exited,
            )
        finally:
            for timer in timers:
                timer.cancel()
    return said, codes, time.monotonic() - began


def _why(codes: tuple[int, ...], said: list[list[str]], seconds: float, length: Length) -> str:
    if seconds >= length.limit_s and all(code == -signal.SIGKILL for code in codes if code):
        return f"{HUNG} {length.limit_s:.0f} s: killed"
    host = next(h for h, code in enumerate(codes) if code)
    telling = [line for line in said[host] if "Error" in line] or [line for line in said[host] if line.strip()]
    return f"host {host} ended with {codes[host]}: {telling[-1][:300] if telling else 'it said nothing'}"


def _shown(argv: list[str]) -> list[str]:
    """Without the folders of this machine."""
    return ["python", *(Path(word).name if word.startswith("/") else word for word in argv[1:])]


def _peer(said: list[list[str]]) -> dict[str, Any]:
    """Rank 0's figures; the memory is that of the host that took most."""
    hosts = [json.loads(next(line for line in reversed(lines) if line.startswith("{"))) for lines in said]
    return {**hosts[0], "peak_bytes": max(h["peak_bytes"] for h in hosts)}


def _ours(
    folder: Path, length: Length, middle: Callable[[Iterable[float]], float], *, in_turns: bool
) -> dict[str, Any]:
    """Rank 0's figures out of the run's own records; a step lasts until the next one's record, or its turn's end."""
    import yaml

    run = folder / "round"
    lines = [json.loads(x) for x in (run / "records.jsonl").read_text().splitlines()]
    steps = [x for x in lines if x["kind"] == "step"]
    times = [b["time_s"] - a["time_s"] for a, b in pairwise(steps)][length.warm - 1 :][: length.steps]
    timed = steps[length.warm :][: length.steps]
    times = [x["step_s"] for x in timed] if in_turns else times
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    return {
        "steps_s": [round(t, 4) for t in times],
        "exposed_s": middle(x["exposed_s"] for x in timed),
        "compute_s": middle(x["compute_s"] for x in timed),
        "wire_bytes": sum(sum(x["wire_bytes"].values()) for x in timed) / len(timed),
        "peak_bytes": max(x["peak_bytes"] for x in timed),
        "loss": timed[-1]["loss"],
        "exchange": plan["exchange"],
        "sync": plan["sync"],
        "forecast": plan["forecast"],
        "tried": [x["message"] for x in lines if x["kind"] == "event" and x["message"].startswith("exchange: tried")],
        "because": plan.get("reasons", {}).get("exchange" if plan["sync"] == "every_step" else "sync", ""),
    }
