"""What an island that falls behind costs a run, and what is left of that where a round does not wait for it.

    python benchmarks/late.py [--rounds 3] [--patience 1] [--busy 30]

Two islands of one process each, on a core of their own, train the model of links.py with DiLoCo every 8 steps. When the
run has made 8, other work comes to the core of the second, 7 processes, for `--busy` seconds. Three runs, in turns:
nothing comes; it comes and rounds wait (straggler_timeout_s: 0); it comes and they do not. Seconds of the run, and its
validation loss at the end, of the same sequences. Wants two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from links import setting
from result import publish, ratio

EVERY, STEPS, CALM_STEPS, OTHERS = 8, 48, 8, 7
_BUSY = "while True: sum(range(10**6))"


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--rounds", type=int, default=3)
    read.add_argument("--patience", type=float, default=1.0)
    read.add_argument("--busy", type=float, default=30.0, help="seconds for which the second island is slow")
    asked = read.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("wanted two cores, one for each island, got one")
    ways = {"nobody_late": (0.0, 0.0), "all_wait": (0.0, asked.busy), "goes_on": (asked.patience, asked.busy)}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        setting.module().save_pretrained(Path(folder) / "init")  # type: ignore[operator]
        for turn in range(asked.rounds):
            for way, (patience_s, busy_s) in ways.items():
                found[way].append(trained(Path(folder) / f"{way}{turn}", patience_s, busy_s, cores))
                print(way, found[way][-1], file=sys.stderr, flush=True)
    calm, waits, goes_on = ([one["seconds"] for one in found[way]] for way in ways)
    left = [(c - a) / (b - a) for a, b, c in zip(calm, waits, goes_on, strict=True)]
    publish(
        "late",
        {
            "runs": found,
            "all_wait_of_nobody_late": ratio(waits, calm),
            "goes_on_of_nobody_late": ratio(goes_on, calm),
            "part_of_the_delay_that_is_left": round(median(left), 3),
            "setting": {"every": EVERY, "steps": STEPS, "busy_s": asked.busy, "patience_s": asked.patience},
        },
    )


def trained(folder: Path, patience_s: float, busy_s: float, cores: list[int]) -> dict[str, Any]:
    """One run in `folder`, and what its records say."""
    folder.mkdir()
    (folder / "run.yaml").write_text(json.dumps(config(folder, patience_s)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    argv = [sys.executable, "-m", "gossamer", "train", str(folder / "run.yaml"), "--json"]
    with subprocess.Popen(argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            wait_for(folder, 1, run)
            for rank, process in workers(folder):
                to_core(process, cores[rank])
            if busy_s:
                wait_for(folder, CALM_STEPS, run)
                with others(cores[1]):
                    time.sleep(busy_s)
            complaints = run.communicate()[1]
        finally:
            run.terminate()  # where something went wrong here: it ends its workers
    if run.returncode:
        raise RuntimeError(f"gossamer train ended with {run.returncode}: {complaints[-2000:]}")
    lines = records(folder)
    (end,), losses = ([one for one in lines if one["kind"] == kind] for kind in ("end", "evaluation"))
    late = [one["step"] for one in lines if one["kind"] == "event" and "was late" in one["message"]]
    return {"seconds": round(end["seconds"], 1), "loss": round(losses[-1]["loss"], 4), "went_on_without_it": late}


def config(folder: Path, patience_s: float) -> dict[str, Any]:
    rule = {"lr": setting.LR, "betas": setting.BETAS, "weight_decay": setting.WEIGHT_DECAY}
    return {
        "model": {"hf": str(folder.parent / "init"), "config": {"use_cache": False}},
        "data": setting.DATA,
        "train": {
            "steps": STEPS,
            "batch": 2 * setting.ROWS,
            "optimizer": {"adamw": rule},
            "max_grad_norm": setting.CLIP,
            "precision": "fp32",
            "evaluate_every": 0,
            "evaluate_sequences": 64,
            "checkpoint_every": 0,
        },
        "machines": {"processes": 2, "threads": 1, "timeout_s": 600.0, "heartbeat_timeout_s": 600.0},
        "plan": {
            "sync": {"diloco": {"sync_every": EVERY, "outer_optimizer": "average", "straggler_timeout_s": patience_s}}
        },
        "run": {"directory": str(folder), "name": "run", "display": "quiet"},
    }


def records(folder: Path) -> list[dict[str, Any]]:
    """Those of the only run in `folder` so far; the last line may not be whole yet."""
    files = list(folder.glob("*/records.jsonl"))
    text = files[0].read_text() if files else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(folder: Path, step: int, run: subprocess.Popen[str]) -> None:
    while not any(one["kind"] == "step" and one["step"] >= step for one in records(folder)):
        if run.poll() is not None:
            raise RuntimeError(f"gossamer train ended before step {step}: {run.communicate()[1][-2000:]}")
        time.sleep(0.1)


def workers(folder: Path) -> Iterator[tuple[int, int]]:
    """(rank, process) of the run in `folder`."""
    for at in Path("/proc").glob("[0-9]*"):
        try:
            line, env = ((at / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        if b"gossamer.job.worker" in line and any(str(folder).encode() in word for word in line):
            yield int(next(word for word in env if word.startswith(b"RANK=")).removeprefix(b"RANK=")), int(at.name)


def to_core(process: int, core: int) -> None:
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def others(core: int) -> Iterator[None]:
    """Other work on a core."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(OTHERS)]
    try:
        for one in busy:
            to_core(one.pid, core)
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


if __name__ == "__main__":
    main()
