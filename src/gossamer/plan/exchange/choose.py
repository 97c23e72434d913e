"""Choose the bucket, in the order of readiness, at which each candidate exchange begins: short steps, small errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate
from gossamer.plan.exchange.measurements import Option, StepMeasurements
from gossamer.plan.exchange.timeline import Timeline, timeline, waited_for
from gossamer.spec.method_config import Exchanges
from gossamer.spec.units import show_bytes, show_seconds

WORTH = 0.05  # of a step: the least saving that justifies a change; less is within the error of the estimate
_PRICE = 0.1  # of a step: the saving that compensates for deferring all of its gradient


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen exchanges of all gradient buckets, with the estimates behind the choice.

    `written`: the value for plan.exchange. `reason`: one line for the user. `plain`: the estimate with all-reduce.
    `waited`: by parameter, the part of its exchange's time on the wire that the step waits for. `dearer`: the fraction
    of a step that the compression error is taken to cost.
    """

    written: Exchanges
    reason: str
    forecast: Timeline
    plain: Timeline
    waited: Mapping[str, float] = field(default_factory=dict)
    dearer: float = 0.0


def choose(facts: StepMeasurements, *, lossy: bool, candidates: Sequence[Candidate] = CANDIDATES) -> Decision:
    """Choose the exchange of every bucket.

    `lossy` false allows only exact exchanges or bf16; the reason then says what lossy exchanges would save.
    """
    plain = timeline(facts, _options(facts, [0] * len(facts.buckets)))
    picked, forecast = _best(facts, candidates, lossy=lossy)
    said = _said(facts, picked, forecast, plain, candidates)
    if not lossy:
        other, better = _best(facts, candidates, lossy=True)
        if better.step_s < forecast.step_s * (1 - WORTH):
            gain = show_seconds(forecast.step_s - better.step_s)
            said += (
                f"; plan.lossy: true would take {_summary(facts, other, candidates)} "
                f"({show_bytes(better.sent_bytes)}) and save {gain} more a step"
            )
    waited = waited_for(facts, _options(facts, picked))
    by_name = {n: part for bucket, part in zip(facts.buckets, waited, strict=True) for n in bucket.names}
    return Decision(_written(facts, picked, candidates), said, forecast, plain, by_name, _dearer(facts, picked))


def _best(facts: StepMeasurements, candidates: Sequence[Candidate], *, lossy: bool) -> tuple[list[int], Timeline]:
    """Return the candidate of every bucket, and the estimate.

    The later a bucket is ready, the more of its exchange is exposed. So candidates follow in order, from exact to
    strongest, and the search is for the bucket where each begins. It moves one beginning after the other to its best
    bucket until none moves, at most as often as there are beginnings. It starts from every choice of a single candidate
    for all.
    """
    usable = [c for c, one in enumerate(candidates) if c == 0 or one.lossy == lossy]
    plain = timeline(facts, _options(facts, [0] * len(facts.buckets)))
    ends = len(facts.buckets)
    starts = [tuple(0 if level < harsh else ends for level in range(len(usable) - 1)) for harsh in range(len(usable))]
    borders = min((_settled(facts, usable, one) for one in starts), key=lambda b: _value(facts, usable, b))
    picked = _picked(facts, usable, borders)
    best = timeline(facts, _options(facts, picked))
    if plain.step_s - best.step_s < WORTH * plain.step_s:
        return [0] * ends, plain
    return picked, best


def _settled(facts: StepMeasurements, usable: Sequence[int], borders: tuple[int, ...]) -> tuple[int, ...]:
    best = _value(facts, usable, borders)
    for _ in borders:
        before = best
        for level in range(len(borders)):
            low = borders[level - 1] if level else 0
            high = borders[level + 1] if level + 1 < len(borders) else len(facts.buckets)
            tried = [(*borders[:level], place, *borders[level + 1 :]) for place in range(low, high + 1)]
            value, place = min((_value(facts, usable, one), i) for i, one in enumerate(tried))
            if value < best:
                best, borders = value, tried[place]
        if best >= before:
            break
    return borders


def _value(facts: StepMeasurements, usable: Sequence[int], borders: tuple[int, ...]) -> float:
    """Return the seconds of a step, increased by the cost of its compression error."""
    picked = _picked(facts, usable, borders)
    return timeline(facts, _options(facts, picked)).step_s * (1 + _dearer(facts, picked))


def _dearer(facts: StepMeasurements, picked: Sequence[int]) -> float:
    """Return the fraction of a step that the compression error costs."""
    return _PRICE * sum(b.weight * o.loss for b, o in zip(facts.buckets, _options(facts, picked), strict=True))


def _picked(facts: StepMeasurements, usable: Sequence[int], borders: tuple[int, ...]) -> list[int]:
    """Return the candidate of each bucket: the last that begins there or before, or the next weaker that serves it."""
    found = []
    for b, bucket in enumerate(facts.buckets):
        level = sum(border <= b for border in borders)
        found.append(next(c for c in reversed(usable[: level + 1]) if bucket.options[c] is not None))
    return found


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
    facts: StepMeasurements, picked: Sequence[int], forecast: Timeline, plain: Timeline, candidates: Sequence[Candidate]
) -> str:
    if not any(picked):
        return (
            f"all-reduce, {show_bytes(plain.sent_bytes)} a step: {show_seconds(plain.exposed_s)} of "
            f"{show_seconds(plain.step_s)} wait for the wire, nothing allowed saves more than it costs"
        )
    return (
        f"{_summary(facts, picked, candidates)}: {show_bytes(plain.sent_bytes)} -> {show_bytes(forecast.sent_bytes)}, "
        f"saves {show_seconds(plain.step_s - forecast.step_s)} of {show_seconds(plain.exposed_s)} exposed"
    )


def _summary(facts: StepMeasurements, picked: Sequence[int], candidates: Sequence[Candidate]) -> str:
    share = {c: sum(b.numel for b, p in zip(facts.buckets, picked, strict=True) if p == c) for c in set(picked)}
    if len(share) == 1:
        return candidates[next(iter(share))].said
    total = max(1, sum(share.values()))
    parts = sorted(share.items(), key=lambda item: -item[1])
    return " and ".join(f"{candidates[c].said} for {100 * n / total:.0f}%" for c, n in parts)
