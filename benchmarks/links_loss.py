"""The loss of what `auto` chose on a slow link, against dense, after so many tokens: several seeds, tuned rates.

    python benchmarks/links_loss.py [--model gpt2|llama] [--rate 100mbit] [--hosts 2] [--tokens 2000000] [--seeds 3]
                                    [--precision bf16]

Takes the exchange from the row of `auto` in docs/results/links.json (run links.py first), or from another such record.
In lockstep, as links.py does with --losses: the loss depends on the exchange, the hosts and the seed, and on no link.
What was measured is kept in the user's cache, and a study that was ended goes on there. Hours on two cores;
`loss_of_dense` is the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from links import setting, venvs
from links.keep import Kept
from links.studies import Budget, Subject, losses
from result import publish

RECORD = Path(__file__).parent.parent / "docs" / "results" / "links.json"


def named(model: str, rate: str) -> str:
    """Return the name of the record; those of GPT-2 and of 100 Mbit/s are not in it."""
    return "_".join(["links_loss", *([model] * (model != setting.GPT2)), *([rate] * (rate != "100mbit"))])


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--model", choices=list(setting.MODELS), default=setting.GPT2)
    read.add_argument("--rate", default="100mbit")
    read.add_argument("--hosts", type=int, default=2)
    read.add_argument("--tokens", type=int, default=2_000_000)
    read.add_argument("--tune-tokens", type=int, default=125_000)
    read.add_argument("--lrs", default="2.5e-4,5e-4,1e-3,2e-3")
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    read.add_argument("--cache", type=Path, default=venvs.folder())
    read.add_argument("--record", type=Path, default=RECORD, help="what links.py wrote")
    read.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    asked = read.parse_args()
    auto = Subject(chosen(asked.record, asked.model, asked.rate, asked.hosts), asked.hosts, model=asked.model)
    dense = Subject("dense", asked.hosts, model=asked.model)
    rates = tuple(float(r) for r in asked.lrs.split(","))
    budget = Budget(asked.tokens, asked.seeds, rates, asked.tune_tokens, asked.precision, asked.jobs)
    found = losses([dense, auto], budget, Kept(asked.cache / "losses.json"), say)
    ratio = found[auto.key()]["final_loss"] / found[dense.key()]["final_loss"]
    told = ("model", "rate", "hosts", "tokens", "tune_tokens", "lrs", "seeds", "precision")
    settings = {k: getattr(asked, k) for k in told}
    publish(
        named(asked.model, asked.rate),
        {
            "loss_of_dense": round(ratio, 5),
            "target": 1.01,
            "auto": {"exchange": auto.exchange, **found[auto.key()]},
            "dense": found[dense.key()],
            "setting": settings,
        },
        script="links_loss",
    )


def chosen(record: Path, model: str, rate: str, hosts: int) -> Any:
    """What `auto` chose in the recorded sweep."""
    rows = json.loads(record.read_text())["rows"]
    wanted = ("auto", model, rate, hosts, 0)  # records of before there were others are of GPT-2
    told = ("method", "model", "rate", "hosts", "round_trip_ms")
    here = [r for r in rows if tuple({"model": setting.GPT2, **r}[name] for name in told) == wanted]
    if not here or "exchange" not in here[0]:
        raise SystemExit(
            f"{record} has no row of auto with {model} at {rate} on {hosts} hosts: run benchmarks/links.py first"
        )
    return here[0]["exchange"]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
