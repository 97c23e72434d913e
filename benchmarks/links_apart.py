"""The loss of islands that train apart, against gradients that meet at every step, after so many tokens.

    python benchmarks/links_apart.py [--periods 16] [--hosts 2] [--tokens 2000000] [--seeds 3] [--precision bf16]

What `plan.sync: auto` chooses from (gossamer.plan.exchange.PERIODS): a tenth of the steps together, then islands of one
host, fragments in four bits. With --after, all runs, dense's too, begin with weights that have so many tokens behind
them, trained together; nothing more is together then, and tokens and bytes are counted afterwards. Two processes on
this machine train with `gossamer train`: the loss depends on the setting, the hosts and the seed, and on no link. The
rate is dense's, which is tuned (see links_loss.py); nothing else is. `dearer`: the part more of steps it takes to
dense's loss, where dense's falls by as much per e-fold of tokens as between a run of a sixteenth of them and this one.
What was measured is kept in the user's cache, and a study that was ended goes on there.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from gossamer.plan.exchange import Period, written_of
from links import setting, venvs
from links.keep import Kept
from links.studies import Budget, Subject, losses
from result import publish


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--periods", default="16")
    read.add_argument("--delay", type=int, default=3, help="steps that a fragment is under way")
    read.add_argument("--hosts", type=int, default=2)
    read.add_argument("--tokens", type=int, default=2_000_000)
    read.add_argument("--after", type=int, default=0, help="tokens that all runs have behind them, trained together")
    read.add_argument("--lr", type=float, default=5e-4, help="dense's, tuned by links_loss.py")
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    read.add_argument("--cache", type=Path, default=venvs.folder())
    asked = read.parse_args()
    together = 0 if asked.after else -(-asked.tokens // setting.tokens(asked.hosts))
    dense = Subject("dense", asked.hosts)
    apart = {
        every: Subject("dense", asked.hosts, sync=written_of(Period(every, 0.0), asked.delay, together))
        for every in map(int, asked.periods.split(","))
    }
    budget = Budget(asked.tokens, asked.seeds, (asked.lr,), 0, asked.precision, jobs=1, after=asked.after)
    kept = Kept(asked.cache / "losses.json")
    found = losses([dense, *apart.values()], budget, kept, say)
    short = losses([dense], replace(budget, tokens=asked.tokens // 16, seeds=1), kept, say)[dense.key()]
    base = found[dense.key()]
    e_folds = math.log((asked.after + asked.tokens) / (asked.after + asked.tokens // 16))
    fall = (short["final_losses"][0] - base["final_losses"][0]) / e_folds
    rows = [{"every": n, "sync": one.sync, **row_of(found[one.key()], base, fall)} for n, one in apart.items()]
    settings = {k: getattr(asked, k) for k in ("hosts", "tokens", "after", "lr", "seeds", "precision", "delay")}
    of_dense = {"fall_per_e_fold": round(fall, 4), "after_a_sixteenth": short["final_loss"], **base}
    publish("links_apart", {"rows": rows, "dense": of_dense, "target": 1.01, "setting": settings})


def row_of(found: dict[str, Any], dense: dict[str, Any], fall: float) -> dict[str, Any]:
    """Against dense, seed by seed."""
    pairs = list(zip(found["final_losses"], dense["final_losses"], strict=True))
    return {
        "loss_of_dense": round(mean(a / b for a, b in pairs), 5),
        "of_seeds": [round(a / b, 5) for a, b in pairs],
        "dearer": round(mean(math.exp((a - b) / fall) - 1 for a, b in pairs), 4),
        **found,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
