"""MuLoCo (Therien et al., arXiv:2505.23725): Muon inside of islands loses less by parting than AdamW does.

Published at 16 islands, of 150M to 3.1B parameters: 1.017 to 1.031 of dense Muon; at 2 islands about as dense. Beside
it DiLoCo (AdamW inside, the same outer optimizer) and AdamW with common second moments, whose islands are averaged. The
islands are simulated in one process. Inner rates are tuned at 2 and 16 islands by all methods alike, and at 4 the
geometric mean of both is taken; the outer optimizer is the same for both of its users, and is not tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

from claims import Row, Study
from claims._lm import Islands, Run, Shape
from claims._pairs import Side, measured, run_once, spread
from claims._trials import Trials
from claims.muon import adamw, muon

SHAPE, EVERY = Shape(width=64, layers=3), 8
OUTER = {"nesterov": {"lr": 0.7, "momentum": 0.6}}
GOAL = 1.02


@dataclass(frozen=True, slots=True)
class Length:
    """Steps, and tokens of a step of all islands together; the more islands, the larger: an island needs enough."""

    steps: int
    tokens: int


LENGTHS = {2: Length(128, 4096), 4: Length(128, 4096), 16: Length(64, 16_384)}
QUICK = Length(16, 2048)
MOST = {2: 5, 16: 5}  # trials of a side
SEEDS = {2: 3, 4: 3, 16: 1}
PUBLISHED = {2: 1.0, 4: None, 16: 1.024}


def studies(*, quick: bool) -> list[Study]:
    return [
        Study(
            "islands_2",
            partial(tuned_at, 2, QUICK if quick else LENGTHS[2], *((3, 1) if quick else (MOST[2], SEEDS[2]))),
        ),
        Study("islands_16", partial(tuned_at, 16, LENGTHS[16], MOST[16], SEEDS[16]), "16 islands take minutes"),
        Study("islands_4", at_four, "needs what 2 and 16 islands were tuned to"),
    ]


def dense(written: Any, length: Length, rate: float) -> Run:
    return Run(shape=SHAPE, optimizer=written(rate), steps=length.steps, tokens=length.tokens)


def apart(
    written: Any, count: int, length: Length, outer: Any, moments_every: int, rate: float, *, every: int = EVERY
) -> Run:
    islands = Islands(count=count, sync_every=every, outer=outer, moments_every=moments_every)
    return Run(shape=SHAPE, optimizer=written(rate), steps=length.steps, tokens=length.tokens, islands=islands)


def sides(count: int, length: Length) -> dict[str, Side]:
    """Rates rise with the number of islands, whose batches are smaller: by count^0.3, the law that was fitted."""
    more = count**0.3
    found = [
        Side("dense adamw", partial(dense, adamw, length), 8e-3),
        Side("dense muon", partial(dense, muon, length), 3.2e-2),
        Side(f"muloco {count}", partial(apart, muon, count, length, OUTER, 0), 3.2e-2 * more),
        Side(f"diloco {count}", partial(apart, adamw, count, length, OUTER, 0), 4e-3 * more),
        Side(f"common {count}", partial(apart, adamw, count, length, "average", 2), 4e-3 * more),
    ]
    return {side.name: side for side in found}


def tuned_at(count: int, length: Length, most: int, seeds: int, trials: Trials) -> list[Row]:
    found = measured([*sides(count, length).values()], trials, seeds=seeds, most=most)
    losses = {name: one.losses for name, one in found.items()}
    told: dict[str, Any] = {name: one.told() for name, one in found.items()}
    if length != QUICK:
        rate = found[f"muloco {count}"].tuned.best
        others = {
            "averaged": apart(muon, count, length, "average", 0, rate),
            "rounds of 2 steps": apart(muon, count, length, OUTER, 0, rate, every=2),
            "averaged, rounds of 2 steps": apart(muon, count, length, "average", 0, rate, every=2),
            "averaged after every step": apart(muon, count, length, "average", 0, rate, every=1),
        }
        told["muloco otherwise"] = {
            name: run_once(f"muloco {count}, {name}", run, rate, trials)["loss"] for name, run in others.items()
        }
    return rows(count, length, losses, told)


def at_four(trials: Trials) -> list[Row]:
    """With the rates that 2 and 16 islands were tuned to, by the trials of these; dense is that of 2 islands."""
    length, mine, names = LENGTHS[4], sides(4, LENGTHS[4]), ("muloco", "diloco", "common")
    assert length == LENGTHS[2] and SEEDS[4] == SEEDS[2]
    two, many = (
        measured(
            [*sides(count, LENGTHS[count]).values()],
            trials.of(f"islands_{count}"),
            seeds=SEEDS[count],
            most=MOST[count],
        )
        for count in (2, 16)
    )
    losses = {name: one.losses for name, one in two.items() if name.startswith("dense")}
    details: dict[str, Any] = {}
    for name in (f"{n} 4" for n in names):
        rate = math.sqrt(two[name[:-1] + "2"].tuned.best * many[name[:-1] + "16"].tuned.best)
        runs = [run_once(name, replace(mine[name].run(rate), seed=s), rate, trials) for s in range(SEEDS[4])]
        losses[name] = [one["loss"] for one in runs]
        details[name] = {"best": rate}
    return rows(4, length, losses, details)


def rows(count: int, length: Length, losses: dict[str, list[float]], details: dict[str, Any]) -> list[Row]:
    """Each method in units of dense training by its own inner optimizer, and of dense AdamW."""
    inner = {f"muloco {count}": "dense muon", f"diloco {count}": "dense adamw", f"common {count}": "dense adamw"}
    found = []
    at_border = [name for name, one in details.items() if one.get("at_border") or one.get("rates", {}).get("at_border")]
    border = f"; best at the border of the grid: {', '.join(at_border)}" * bool(at_border)
    for name, own in inner.items():
        for baseline in dict.fromkeys((own, "dense adamw")):
            is_paper = name.startswith("muloco") and baseline == "dense muon"
            each = [a / b for a, b in zip(losses[name], losses[baseline], strict=True)]
            found.append(
                Row(
                    method=name.split()[0],
                    claim=f"loss at equal tokens, of {baseline}; holds: at most {GOAL}",
                    baseline=baseline,
                    ratio=round(mean(each), 5),
                    paper_ratio=PUBLISHED[count] if is_paper else None,
                    spread=spread(each) if len(each) > 1 else None,
                    seeds=len(each),
                    setting=f"{count} islands, a round of {EVERY} steps; {dense(adamw, length, 1.0).told()}{border}",
                    holds=mean(each) <= GOAL,
                    details={"losses": {n: losses[n] for n in (name, baseline)}, "rates": details},
                )
            )
    return found
