"""The choice itself: greedy, from exact to lossy, as long as exposed time is saved that is worth it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.plan.exchange.candidates import CANDIDATES, Candidate
from gossamer.plan.exchange.facts import Facts, Option
from gossamer.plan.exchange.timeline import Timeline, timeline
from gossamer.spec.choice import Exchanges
from gossamer.spec.units import show_bytes, show_seconds

WORTH = 0.02  # of a step: what all changes together must save, or nothing is changed
_LITTLE = 0.002  # of a step: what a single change must save
_PRICE = 0.1  # of a step: what a change that loses all of the gradient would have to save
_LEAST_LOSS = 1e-6  # an exact method loses nothing, and still a change must have a price


@dataclass(frozen=True, slots=True)
class Decision:
    """`written`: what plan.exchange becomes. `reason`: one line for people. `plain`: the forecast with all-reduce."""

    written: Exchanges
    reason: str
    forecast: Timeline
    plain: Timeline


def choose(facts: Facts, *, lossy: bool, candidates: Sequence[Candidate] = CANDIDATES) -> Decision:
    """The exchange of every bucket. With `lossy` false only what is exact, or bf16; the reason then says what lossy
    exchanges would gain.
    """
    plain = timeline(facts, _options(facts, [0] * len(facts.buckets)))
    picked, forecast = _greedy(facts, candidates, lossy=lossy)
    said = _said(facts, picked, forecast, plain, candidates)
    if not lossy:
        other, better = _greedy(facts, candidates, lossy=True)
        if better.step_s < forecast.step_s * (1 - WORTH):
            gain = show_seconds(forecast.step_s - better.step_s)
            said += (
                f"; plan.lossy: true would take {_summary(facts, other, candidates)} "
                f"({show_bytes(better.sent_bytes)}) and save {gain} more a step"
            )
    return Decision(_written(facts, picked, candidates), said, forecast, plain)


def _greedy(facts: Facts, candidates: Sequence[Candidate], *, lossy: bool) -> tuple[list[int], Timeline]:
    picked = [0] * len(facts.buckets)
    plain = best = timeline(facts, _options(facts, picked))
    while change := _best_change(facts, picked, best, candidates, lossy=lossy):
        bucket, option, best = change
        picked[bucket] = option
    picked, best = _undone(facts, picked, best)
    if plain.step_s - best.step_s < WORTH * plain.step_s:
        return [0] * len(facts.buckets), plain
    return picked, best


def _best_change(
    facts: Facts, picked: list[int], now: Timeline, candidates: Sequence[Candidate], *, lossy: bool
) -> tuple[int, int, Timeline] | None:
    """(bucket, candidate, forecast) that saves most per loss, among those that save enough; None: there is none."""
    found: list[tuple[float, int, int, Timeline]] = []
    for b, bucket in enumerate(facts.buckets):
        for c, option in enumerate(bucket.options):
            if option is None or c == picked[b] or (candidates[c].lossy and not lossy):
                continue
            after = timeline(facts, _options(facts, [*picked[:b], c, *picked[b + 1 :]]))
            saved = now.step_s - after.step_s
            harm = max(_LEAST_LOSS, _loss(facts, b, c) - _loss(facts, b, picked[b]))
            if saved > (_LITTLE + _PRICE * harm) * now.step_s:
                found.append((saved / harm, b, c, after))
    if not found:
        return None
    _, b, c, after = max(found, key=lambda f: f[0])
    return b, c, after


def _undone(facts: Facts, picked: list[int], best: Timeline) -> tuple[list[int], Timeline]:
    """Take back to a less lossy candidate what a later change has made needless; the bucket with most to win first."""
    order = sorted(range(len(picked)), key=lambda b: -_loss(facts, b, picked[b]))
    for b in order:
        milder = [
            c for c, o in enumerate(facts.buckets[b].options) if o and _loss(facts, b, c) < _loss(facts, b, picked[b])
        ]
        for c in sorted(milder, key=lambda c, b=b: _loss(facts, b, c)):  # type: ignore[misc]
            tried = [*picked[:b], c, *picked[b + 1 :]]
            after = timeline(facts, _options(facts, tried))
            if after.step_s <= best.step_s * (1 + _LITTLE / 4):
                picked, best = tried, after
                break
    return picked, best


def _loss(facts: Facts, bucket: int, candidate: int) -> float:
    option = facts.buckets[bucket].options[candidate]
    return 0.0 if option is None else facts.buckets[bucket].weight * option.loss


def _options(facts: Facts, picked: Sequence[int]) -> list[Option]:
    found = [bucket.options[c] for bucket, c in zip(facts.buckets, picked, strict=True)]
    assert all(o is not None for o in found)
    return [o for o in found if o is not None]


def _written(facts: Facts, picked: Sequence[int], candidates: Sequence[Candidate]) -> Exchanges:
    """One choice, or rules: for every candidate but the commonest a pattern of names, that one for all the rest."""
    kinds = sorted(set(picked), key=lambda c: sum(p == c for p in picked))
    if len(kinds) == 1:
        return candidates[kinds[0]].written
    rules = []
    for c in kinds[:-1]:
        names = [re.escape(n) for b, p in zip(facts.buckets, picked, strict=True) if p == c for n in b.names]
        rules.append((f"^({'|'.join(names)})$", "all", candidates[c].written))
    return [*rules, (".*", "all", candidates[kinds[-1]].written)]


def _said(
    facts: Facts, picked: Sequence[int], forecast: Timeline, plain: Timeline, candidates: Sequence[Candidate]
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


def _summary(facts: Facts, picked: Sequence[int], candidates: Sequence[Candidate]) -> str:
    share = {c: sum(b.numel for b, p in zip(facts.buckets, picked, strict=True) if p == c) for c in set(picked)}
    if len(share) == 1:
        return candidates[next(iter(share))].said
    total = max(1, sum(share.values()))
    parts = sorted(share.items(), key=lambda item: -item[1])
    return " and ".join(f"{candidates[c].said} for {100 * n / total:.0f}%" for c, n in parts)
