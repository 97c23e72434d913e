"""The loss of islands that train apart, against gradients that meet at every step, after so many tokens.

    python benchmarks/links_apart.py [--periods 16] [--hosts 2] [--tokens 2000000] [--seeds 3] [--precision bf16]

What `plan.sync: auto` chooses from (gossamer.plan.exchange.PERIODS): a tenth of the steps together, then islands of one
host, fragments in four bits. With --after, all runs, dense's too, begin with weights that have so many tokens behind
them, trained together; nothing more is together then, and tokens and bytes are counted afterwards. Two processes on
this machine train with `gossamer train`: the loss depends on the setting, the hosts and the seed, and on no link.
Several --lrs are tried by all alike, dense too, for --tune-tokens with the first seed; one is taken as it is.
--outer mean: the anchor goes to the mean of the islands, which carry on what they moved since; momentum: Nesterov's.

`dearer`: the part more of steps it takes to dense's loss, where dense's falls by as much per e-fold of tokens as
between a run of a sixteenth of them and this one. `bytes_of_ddp`: what a host sends, of what it would by all-reducing
float32 gradients. What was measured is kept in the user's cache, and a study that was ended goes on there.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from gossamer.plan.exchange import SyncPeriod, written_of
from links import setting, venvs
from links.keep import Kept
from links.studies import Budget, Subject, losses
from result import publish


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--periods", default="16")
    read.add_argument("--sync", action="append", default=[], metavar="YAML", help="a plan.sync of one's own, as a row")
    read.add_argument("--delay", type=int, default=3, help="steps that a fragment is under way")
    read.add_argument("--hosts", type=int, default=2)
    read.add_argument("--tokens", type=int, default=2_000_000)
    read.add_argument("--after", type=int, default=0, help="tokens that all runs have behind them, trained together")
    read.add_argument("--lrs", default="5e-4", help="rates to choose from")
    read.add_argument("--tune-tokens", type=int, default=500_000)
    read.add_argument("--beta2", type=float, default=setting.BETAS[1])
    read.add_argument("--outer", choices=["mean", "momentum"], default="momentum")
    read.add_argument("--second-moments", type=int, default=0, help="rounds from one meeting of these to the next")
    read.add_argument("--seeds", type=int, default=3)
    read.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    read.add_argument("--record", default="links_apart", help="name of the file in docs/results")
    read.add_argument("--cache", type=Path, default=venvs.folder())
    asked = read.parse_args()
    dense = Subject("dense", asked.hosts)
    written = [sync_of(int(every), asked) for every in asked.periods.split(",")] + list(map(yaml.safe_load, asked.sync))
    apart = [Subject("dense", asked.hosts, sync=one) for one in written]
    lrs = tuple(float(lr) for lr in asked.lrs.split(","))
    budget = Budget(
        asked.tokens, asked.seeds, lrs, asked.tune_tokens, asked.precision, 1, after=asked.after, beta2=asked.beta2
    )
    kept = Kept(asked.cache / "losses.json")
    found = losses([dense, *apart], budget, kept, say)
    base = found[dense.key()]
    first = replace(budget, tokens=asked.tokens // 16, seeds=1, rates=(base["lr"],))
    short = losses([dense], first, kept, say)[dense.key()]
    e_folds = math.log((asked.after + asked.tokens) / (asked.after + asked.tokens // 16))
    fall = (short["final_losses"][0] - base["final_losses"][0]) / e_folds
    rows = [{"sync": one.sync, **row_of(found[one.key()], base, fall, asked)} for one in apart]
    told = ("hosts", "tokens", "after", "lrs", "tune_tokens", "beta2", "outer", "second_moments", "seeds", "delay")
    of_dense = {"fall_per_e_fold": round(fall, 4), "after_a_sixteenth": short["final_loss"], **base}
    settings = {"precision": asked.precision, **{name: getattr(asked, name) for name in told}}
    publish(asked.record, {"rows": rows, "dense": of_dense, "target": 1.01, "setting": settings}, script="links_apart")


def sync_of(every: int, asked: argparse.Namespace) -> Any:
    """Islands that come together after so many steps."""
    steps = 0 if asked.after else -(-asked.tokens // setting.tokens(asked.hosts))
    written = written_of(SyncPeriod(every, 0.0), asked.delay, steps)
    if asked.outer == "mean":
        (loop,) = written.values()  # type: ignore[union-attr]
        kept = {name: value for name, value in loop.items() if name != "mix"}
        written = {"diloco": {**kept, "keep_local_progress": True, "outer_optimizer": "average"}}
    if asked.second_moments:
        (loop,) = written.values()  # type: ignore[union-attr]
        written = {"diloco": {**loop, "average_second_moments_every": asked.second_moments}}
    return written


def row_of(found: dict[str, Any], dense: dict[str, Any], fall: float, asked: argparse.Namespace) -> dict[str, Any]:
    """Against dense, seed by seed."""
    of_ddp = 4 * setting.PARAMETERS[setting.GPT2] * math.ceil(asked.tokens / setting.tokens(asked.hosts))
    of_ddp = of_ddp * 2 * (asked.hosts - 1) // asked.hosts
    pairs = list(zip(found["final_losses"], dense["final_losses"], strict=True))
    return {
        "loss_of_dense": round(mean(a / b for a, b in pairs), 5),
        "of_seeds": [round(a / b, 5) for a, b in pairs],
        "bytes_of_ddp": round(mean(found["sent_bytes"]) / of_ddp, 5),
        "dearer": round(mean(math.exp((a - b) / fall) - 1 for a, b in pairs), 4),
        **found,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
