"""Which rounds are measured, in which order, and how long each may take.

For every number of hosts the rounds are dealt into alternations. Each alternation begins with the denominator (dense
of ours on links that are not shaped), and what is held against it most strictly (`auto`, on every link) comes again in
every alternation, in shorter rounds. Everything else is measured once per link.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from gossamer.comm.message import ProcessGroups
from gossamer.plan import price_of
from gossamer.recipe import PlanMethods
from gossamer.spec.plan import BUCKET_BYTES, Plan
from gossamer.spec.units import read_rate
from links import setting
from links.keep import Kept
from links.method import ALONE, KNOWN, UNTHROTTLED, Method
from links.rounds import HUNG, UNSHAPED, Length, Link, measure

_COMPUTE_S, _START_S = 1.5, 90.0  # of a step on a core; to begin a round, generously
_OF_DENSE = {"ddp_fp16": 0.5, "ddp_powersgd": 0.05, "ddp_powersgd_one_bucket": 0.05, "zero1": 1.5, "zero2": 1.5}
_OF_DENSE["zero3"] = 1.5


@dataclass(frozen=True, slots=True)
class Pace:
    """`steps` timed steps of a model at most, fewer where they would take longer than `budget_s`."""

    steps: int
    warm: int
    budget_s: float
    alternations: int
    cores: int
    model: str = setting.GPT2


@dataclass(frozen=True, slots=True)
class Turn:
    """One method on one link, measured for the `turn`-th time, with a model of `setting`."""

    method: Method
    link: Link
    length: Length
    turn: int
    model: str = setting.GPT2

    def key(self, commit: str) -> str:
        what = [
            self.method.name,
            self.method.plan,
            asdict(self.link),
            asdict(self.length),
            self.turn,
            self.model,
            commit,
        ]
        return json.dumps(what, sort_keys=True)


def turns(methods: list[Method], links: list[Link], pace: Pace) -> Iterator[Turn]:
    """All rounds on links of the same number of hosts, in the order in which they run."""
    free = replace(links[0], rate=UNSHAPED, delay_ms=0.0, between="")
    again = [m for m in methods if m.name.startswith("auto")]
    once = [(m, link) for link in links for m in methods if m not in again]
    each = -(-pace.steps // pace.alternations)
    for turn in range(pace.alternations):
        paired = [(KNOWN[UNTHROTTLED], free), *((m, free) for m in again)]
        for method, link in paired[:: 1 if turn % 2 == 0 else -1]:  # who goes first alternates
            yield _turn(method, link, pace, max(2, each), turn)
        yield _turn(ALONE, free, pace, max(2, each), turn)
        for method, link in [(m, link) for link in links if link != free for m in again]:
            yield _turn(method, link, pace, max(2, each), turn)
        for method, link in once[turn :: pace.alternations]:
            yield _turn(method, link, pace, pace.steps, 0)


def run(todo: Iterator[Turn], kept: Kept, commit: str, say: Callable[[str], None]) -> list[tuple[Turn, dict[str, Any]]]:
    """Measure what has not been measured."""
    found: list[tuple[Turn, dict[str, Any]]] = []
    hung: dict[tuple[str, int], dict[str, Any]] = {}  # a hang costs its whole limit, and is the same on every link
    for turn in todo:
        who = (turn.method.name, turn.link.hosts)
        result = kept.get(turn.key(commit)) or hung.get(who)
        if result is None or ("error" in result and not turn.method.peer):
            result = measure(turn.method, turn.link, turn.length, model=turn.model)
            kept.put(turn.key(commit), result)
        if turn.method.peer and HUNG in result.get("error", ""):
            hung.setdefault(who, {**result, "error": f"{result['error']} (at {turn.link.rate})"})
        told = result.get("error") or f"{result['step_s']:.3f} s per step, {result['wire_bytes'] / 1e6:.2f} MB"
        say(f"{turn.method.name} on {turn.link.hosts} hosts, {turn.link.rate}: {told} ({result.get('seconds')} s)")
        found.append((turn, result))
    return found


def _turn(method: Method, link: Link, pace: Pace, steps: int, turn: int) -> Turn:
    step_s = expected_s(method, link, pace)
    count = max(1, min(steps, int(pace.budget_s / step_s)))
    count = method.period * max(1, count // method.period)
    warm = pace.warm if step_s * (pace.warm + count) < 2 * pace.budget_s else 1
    # A run that was started on a loaded machine is not to be taken for one that hangs.
    limit = _START_S + 30.0 * link.hosts / pace.cores + 3.0 * step_s * (warm + count)
    return Turn(method, link, Length(count, warm, limit), turn, pace.model)


def expected_s(method: Method, link: Link, pace: Pace) -> float:
    """Roughly a step's seconds, to know how many of them are worth their time."""
    compute = _COMPUTE_S * max(1.0, link.hosts / pace.cores)
    if method.name == ALONE.name or link.rate == UNSHAPED:
        return compute
    rate = min(read_rate(r) for r in (link.rate, link.between) if r not in ("", UNSHAPED))
    return compute + _bytes(method, link.hosts, pace.model) / (0.95 * rate)


def _bytes(method: Method, hosts: int, model: str) -> float:
    dense = 4.0 * setting.PARAMETERS[model] * 2 * (hosts - 1) / hosts
    if method.peer or method.period > 1:
        return dense * _OF_DENSE.get(method.name, 1.0) / method.period
    if method.plan["exchange"] == "auto":
        return dense * (0.05 if method.plan.get("lossy") else 0.5)
    shapes = tuple((name, tuple(p.shape)) for name, p in setting.module(model).named_parameters())
    plan = Plan(rows=(1,), microbatches=(1,), exchange=method.plan["exchange"], bucket_bytes=BUCKET_BYTES)
    return float(max(price_of(PlanMethods.of(plan), shapes, ProcessGroups.flat(hosts)).sent_bytes))
