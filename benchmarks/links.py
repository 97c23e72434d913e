"""Training over slow links: Gossamer's exchanges beside what else there is, on real hosts in the laboratory.

    python benchmarks/links.py [--rates 10mbit,100mbit,1gbit] [--hosts 2,4] [--methods all] [--seeds 3] [--json]
    python benchmarks/links.py --quick          # a few minutes: two hosts, 100 Mbit/s, few methods, hardly any loss

Needs root and iproute2 (see `gossamer doctor`). A GPT-2 of 17.4 million parameters (with --model llama an
untied Llama of 12.9 million) trains on 4 x 256 tokens per host and step, one thread per host.
Speed: 20 steps per method and link (fewer where a step takes many seconds). The
denominator, dense of ours on links that are not shaped, takes turns with the methods. Loss: after --tokens, in
lockstep, once per exchange, hosts and seed; every exchange's learning rate is tuned by the same budget. Seconds to a
target loss are the product. What was measured is kept in the user's cache, and a sweep that was ended goes on there.

    --islands 2x2 --between 10mbit   islands instead of one switch (sets the hosts)
    --delay 10                       besides, every method at --delay-rate with so many ms one way (first of --hosts)
    --exchange NAME=YAML             an exchange of one's own as a row: --exchange 'mine={two_shot: int8}'
    --turns 8                        on a machine whose speed varies: all programs train at once and take turns of four
                                     steps, so that each has its share of every minute; takes the memory of all of
                                     them, but of no more than --at-once hosts
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from links import interleaved, setting, venvs
from links.keep import Kept
from links.method import Method, chosen
from links.rounds import UNSHAPED, Link
from links.rows import denominators, rows_of, subject, with_losses
from links.studies import Budget, Subject, losses
from links.sweep import Pace, Turn, run, turns
from links.table import show
from result import commit, publish

QUICK = {"rates": "100mbit", "hosts": "2", "methods": "ddp,ddp_fp16,dense,ef_int8,auto", "delay": 0.0, "seeds": 1}
QUICK |= {"steps": 3, "warm": 1, "alternations": 2, "tokens": 40 * 2048, "tune_tokens": 0, "lrs": "1e-3"}


def main() -> None:
    asked = arguments()
    methods = chosen(asked.methods, asked.exchange)
    rounds: list[Any] = []
    name = "quick" if asked.quick else asked.record  # rounds of one record take turns: none is from another sweep
    kept = Kept(asked.cache / f"rounds_{name}.json")
    if asked.turns:
        rounds = in_turns(asked, methods)
    pace = Pace(asked.steps, asked.warm, asked.budget, asked.alternations, len(os.sched_getaffinity(0)), asked.model)
    for group in () if asked.turns else link_groups(asked):
        rounds += run(turns(methods, group, pace), kept, commit(), say)
    free = denominators(rounds)
    rows = rows_of(rounds, free)
    found = measured_losses(asked, rows)
    rows, targets = with_losses(rows, found, asked.margin)
    figures = {"quick": asked.quick, "unthrottled": free, "target_loss": targets, "setting": described(asked)}
    finish(asked, {**figures, "rows": rows})


def arguments() -> argparse.Namespace:
    read = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    read.add_argument("--rates", default="10mbit,100mbit,1gbit")
    read.add_argument("--model", choices=list(setting.MODELS), default=setting.GPT2)
    read.add_argument("--hosts", default="2,4")
    read.add_argument("--islands", help="2x2 or 3,1, as in gossamer lab")
    read.add_argument("--between", default="", help="rate of an island's uplink")
    read.add_argument("--methods", default="all")
    read.add_argument("--exchange", action="append", default=[], metavar="NAME=YAML")
    read.add_argument("--delay", type=float, default=10.0, help="ms one way")
    read.add_argument("--delay-rate", default="100mbit")
    read.add_argument("--seeds", type=int, default=3, help="0: no losses")
    read.add_argument("--losses", default="all", help="the methods whose loss is measured, besides dense's")
    read.add_argument("--tokens", type=int, default=2_000_000)
    read.add_argument("--tune-tokens", type=int, default=125_000)
    read.add_argument("--lrs", default="5e-4,1e-3,2e-3", help="rates to choose from")
    read.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of the losses' forward and backward"
    )
    read.add_argument("--margin", type=float, default=0.01, help="the target loss is that of dense and so much more")
    read.add_argument("--steps", type=int, default=20)
    read.add_argument("--warm", type=int, default=2)
    read.add_argument("--budget", type=float, default=20.0, help="seconds of timed steps a round may take")
    read.add_argument("--alternations", type=int, default=5)
    read.add_argument("--turns", type=int, default=0, help="all programs at once, in so many turns of a few steps")
    read.add_argument("--steps-of-a-turn", type=int, default=4, help="the first of them does not count")
    read.add_argument("--at-once", type=int, default=14, help="hosts that take turns together; each has 1 to 2 GB")
    read.add_argument("--cache", type=Path, default=venvs.folder())
    read.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="losses at a time")
    read.add_argument("--record", default="links", help="name of the file in docs/results")
    read.add_argument("--quick", action="store_true")
    read.add_argument("--json", action="store_true", help="no table")
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    if "--quick" in sys.argv[1:]:
        read.set_defaults(**{k: v for k, v in QUICK.items() if k not in given})
    return read.parse_args()


def in_turns(asked: argparse.Namespace, methods: list[Method]) -> list[tuple[Turn, dict[str, Any]]]:
    """The figures of all methods on all links of each number of hosts, trained at once in turns.

    Where they are too many for `--at-once` hosts, the denominators train again beside the next ones.
    """
    found = []
    for links in link_groups(asked):
        free = replace(links[0], rate=UNSHAPED, delay_ms=0.0, between="")
        programs = max(1, asked.at_once // links[0].hosts - 2)  # beside both denominators
        size = max(1, programs // len(links))
        for begin in range(0, len(methods), size):
            todo = interleaved.programs(
                methods[begin : begin + size],
                links,
                free,
                model=asked.model,
                rounds=asked.turns,
                steps=asked.steps_of_a_turn,
            )
            for one, result in zip(todo, interleaved.run(todo, say), strict=True):
                rounds = enumerate(interleaved.by_turn(result, one), begin * asked.turns)
                found += [(Turn(one.method, one.link, one.length, turn, one.model), row) for turn, row in rounds]
    return found


def link_groups(asked: argparse.Namespace) -> list[list[Link]]:
    """The links to measure on, by number of hosts."""
    sizes = islands_of(asked.islands)
    groups = []
    for hosts in [sum(sizes)] if sizes else [int(n) for n in asked.hosts.split(",")]:
        common = {"hosts": hosts, "islands": sizes, "between": asked.between if sizes else ""}
        group = [Link(rate=rate, **common) for rate in asked.rates.split(",")]
        if asked.delay and not groups:  # one row per method: with the fewest hosts
            group.append(Link(rate=asked.delay_rate, delay_ms=asked.delay, **common))
        groups.append(group)
    return groups


def islands_of(text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        return (int(match[2]),) * int(match[1])
    return tuple(int(size) for size in text.split(","))


def measured_losses(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if not asked.seeds:
        return {}
    some = [r for r in rows if asked.losses in ("all", r["method"]) or r["method"] in asked.losses.split(",")]
    wanted = [s for row in some if (s := subject(row)) is not None]
    wanted += [Subject("dense", hosts, model=asked.model) for hosts in {row["hosts"] for row in some}]
    rates = tuple(float(r) for r in asked.lrs.split(","))
    budget = Budget(asked.tokens, asked.seeds, rates, asked.tune_tokens, asked.precision, asked.jobs)
    return losses(wanted, budget, Kept(asked.cache / "losses.json"), say)


def described(asked: argparse.Namespace) -> dict[str, Any]:
    told = ("seeds", "tokens", "tune_tokens", "lrs", "precision", "margin")
    told += ("turns", "steps_of_a_turn") if asked.turns else ("steps", "alternations")
    model = {
        "model": asked.model,
        "parameters": setting.PARAMETERS[asked.model],
        "tokens_per_host_and_step": setting.ROWS * setting.SEQUENCE,
    }
    definitions = {
        "wire_bytes": "sent by rank 0 per step; ours: payload as metered, peers: as its interface counts",
        "exposed_share": "ours: waiting for the wire after backward; peers: beyond a step that sends nothing",
        "loss of peers": "that of the exchange of ours with the same mathematics; null where there is none",
        "floor_s": "auto: a step without exchange, and what its plan says before step 1 that no order hides: "
        "processor time of codes and messages beside backward, the last bucket's encoding, way and decoding",
        "share_at_floor": "share_of_unthrottled of a step of floor_s",
        "unshaped": f"rows at rate {UNSHAPED!r} are on links that are not shaped",
    }
    return {**model, "data": setting.DATA, **{k: getattr(asked, k) for k in told}, "definitions": definitions}


def finish(asked: argparse.Namespace, figures: dict[str, Any]) -> None:
    if not asked.json:
        print(show(figures["rows"]))
    if asked.quick:  # no record: too short to be one
        print(json.dumps({**figures, "command": " ".join(["python", "benchmarks/links.py", *sys.argv[1:]])}))
    else:
        publish(asked.record, figures, script="links")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
