"""Choose the bucket, in the order of readiness, at which each candidate exchange begins: short steps, small errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate
from gossamer.plan.exchange.measurements import Option, StepMeasurements
from gossamer.plan.exchange.step_search import StepSearch, dearer_of, lost_of
from gossamer.plan.exchange.step_tasks import cost_of_step, tasks_of_step, waited_for
from gossamer.spec.clock import play
from gossamer.spec.cost import Cost
from gossamer.spec.method_config import Exchanges
from gossamer.spec.units import show_bytes, show_seconds

WORTH = 0.05  # of a step: the least saving that justifies a change; less is within the error of the estimate


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen exchanges of all gradient buckets, with the estimates behind the choice.

    `written`: the value for plan.exchange. `reason`: one line for the user. `plain`: the estimate with all-reduce.
    `waited`: by parameter, the part of its exchange's time on the wire that the step waits for. `dearer`: the fraction
    of a step that the compression error is taken to cost.
    """

    written: Exchanges
    reason: str
    forecast: Cost
    plain: Cost
    waited: Mapping[str, float] = field(default_factory=dict)
    dearer: float = 0.0


def choose(facts: StepMeasurements, *, lossy: bool, candidates: Sequence[Candidate] = CANDIDATES) -> Decision:
    """Choose the exchange of every bucket.

    `lossy` false allows only exact exchanges or bf16; the reason then says what lossy exchanges would save.
    """
    plain = _cost(facts, [0] * len(facts.buckets))
    picked, forecast = _best(facts, candidates, lossy=lossy)
    said = _said(facts, picked, forecast, plain, candidates)
    if not lossy:
        other, better = _best(facts, candidates, lossy=True)
        if better.step_s < forecast.step_s * (1 - WORTH):
            gain = show_seconds(forecast.step_s - better.step_s)
            said += (
                f"; plan.lossy: true would take {_summary(facts, other, candidates)} "
                f"({show_bytes(better.sent_bytes[0])}) and save {gain} more a step"
            )
    waited = waited_for(facts, _options(facts, picked))
    by_name = {n: part for bucket, part in zip(facts.buckets, waited, strict=True) for n in bucket.names}
    dearer = dearer_of(lost_of(bucket, c) for bucket, c in zip(facts.buckets, picked, strict=True))
    return Decision(_written(facts, picked, candidates), said, forecast, plain, by_name, dearer)


def _best(facts: StepMeasurements, candidates: Sequence[Candidate], *, lossy: bool) -> tuple[list[int], Cost]:
    """Return the candidate of every bucket, and the estimate; the plain all-reduce where others save too little."""
    usable = [c for c, one in enumerate(candidates) if c == 0 or one.lossy == lossy]
    plain = _cost(facts, [0] * len(facts.buckets))
    search = StepSearch.over(facts, usable)
    picked = search.picked(search.best())
    best = _cost(facts, picked)
    if plain.step_s - best.step_s < WORTH * plain.step_s:
        return [0] * len(facts.buckets), plain
    return picked, best


def _cost(facts: StepMeasurements, picked: Sequence[int]) -> Cost:
    return cost_of_step(facts, play(tasks_of_step(facts, _options(facts, picked))))


def _options(facts: StepMeasurements, picked: Sequence[int]) -> list[Option]:
    found = [bucket.options[c] for bucket, c in zip(facts.buckets, picked, strict=True)]
    assert all(o is not None for o in found)
    return [o for o in found if o is not None]


def _written(facts: StepMeasurements, picked: Sequence[int], candidates: Sequence[Candidate]) -> Exchanges:
    """Return one exchange, or rules: patterns of names for all candidates but the most common, which gets the rest."""
    kinds = sorted(set(picked), key=lambda c: sum(p == c for p in picked)) or [0]  # of no bucket: as they are
    if len(kinds) == 1:
        return candidates[kinds[0]].written
    rules = []
    for c in kinds[:-1]:
        names = [re.escape(n) for b, p in zip(facts.buckets, picked, strict=True) if p == c for n in b.names]
        rules.append((f"^({'|'.join(names)})$", "all", candidates[c].written))
    return [*rules, (".*", "all", candidates[kinds[-1]].written)]


def _said(
    facts: StepMeasurements, picked: Sequence[int], forecast: Cost, plain: Cost, candidates: Sequence[Candidate]
) -> str:
    before, after = (show_bytes(line.sent_bytes[0]) for line in (plain, forecast))
    if not any(picked):
        return (
            f"all-reduce, {before} a step: {show_seconds(plain.exposed_s)} of "
            f"{show_seconds(plain.step_s)} wait for the wire, nothing allowed saves more than it costs"
        )
    return (
        f"{_summary(facts, picked, candidates)}: {before} -> {after}, "
        f"saves {show_seconds(plain.step_s - forecast.step_s)} of {show_seconds(plain.exposed_s)} exposed"
    )


def _summary(facts: StepMeasurements, picked: Sequence[int], candidates: Sequence[Candidate]) -> str:
    share = {c: sum(b.numel for b, p in zip(facts.buckets, picked, strict=True) if p == c) for c in set(picked)}
    if len(share) == 1:
        return candidates[next(iter(share))].said
    total = max(1, sum(share.values()))
    parts = sorted(share.items(), key=lambda item: -item[1])
    return " and ".join(f"{candidates[c].said} for {100 * n / total:.0f}%" for c, n in parts)
