"""The loss of islands that train apart, against gradients that meet at every step, after so many tokens.

    python benchmarks/links_apart.py [--periods 16,48] [--hosts 2] [--tokens 2000000] [--seeds 3] [--precision bf16]

What `plan.sync: auto` chooses from (gossamer.plan.exchange.PERIODS): a tenth of the steps together, then islands of one
host, fragments in four bits. Two processes on this machine train with `gossamer train`: the loss depends on the
setting, the hosts and the seed, and on no link. The rate is dense's, which is tuned (see links_loss.py); nothing else
is. `dearer`: the part more of steps it takes to the loss, read off dense's own curve: how many tokens earlier dense was
there. What was measured is kept in the user's cache, and a study that was ended goes on there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gossamer.plan.exchange import Period, written_of
from links import setting, venvs
from links.keep import Kept
from links.losses import crossing
from links.studies import Budget, Subject, losses
from result import publish


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--periods", default="16,48")
    read.add_argument("--delay", type=int, default=3, help="steps that a fragment is under way")
    read.add_argument("--hosts", type=int, default=2)
    read.add_argument("--tokens", type=int, default=2_000_000)
    read.add_argument("--lr", type=float, default=5e-4, help="dense's, tuned by links_loss.py")
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    read.add_argument("--cache", type=Path, default=venvs.folder())
    asked = read.parse_args()
    steps = -(-asked.tokens // setting.tokens(asked.hosts))
    dense = Subject("dense", asked.hosts)
    apart = {
        every: Subject("dense", asked.hosts, sync=written_of(Period(every, 0.0), asked.delay, steps))
        for every in map(int, asked.periods.split(","))
    }
    budget = Budget(asked.tokens, asked.seeds, (asked.lr,), 0, asked.precision, jobs=1)
    found = losses([dense, *apart.values()], budget, Kept(asked.cache / "losses.json"), say)
    base = found[dense.key()]
    rows = [{"every": every, "sync": one.sync, **row_of(found[one.key()], base)} for every, one in apart.items()]
    settings = {k: getattr(asked, k) for k in ("hosts", "tokens", "lr", "seeds", "precision", "delay")}
    publish("links_apart", {"rows": rows, "dense": base, "target": 1.01, "setting": settings})


def row_of(found: dict[str, Any], dense: dict[str, Any]) -> dict[str, Any]:
    """Against dense, seed by seed."""
    ratios = [a / b for a, b in zip(found["final_losses"], dense["final_losses"], strict=True)]
    earlier = [crossing(curve, loss) for curve, loss in zip(dense["curves"], found["final_losses"], strict=True)]
    tokens = dense["curves"][0][-1][0]
    dearer = [tokens / at - 1 if at is not None else 0.0 for at in earlier]
    return {
        "loss_of_dense": round(sum(ratios) / len(ratios), 5),
        "of_seeds": [round(r, 5) for r in ratios],
        "dearer": round(sum(dearer) / len(dearer), 4),
        **found,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
