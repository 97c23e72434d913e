"""Every pair of features that docs/reference/support.md says to work trains, and computes what both promise.

A pair is run on four ranks for four steps of a tiny model. What its losses are held against is said in
`pair_statements`. All pairs by `make nightly`, a spread of them in `make test`.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from pool import Pool
from recipe.features import support
from recipe.pair_statements import (
    EXACT,
    ISLANDS,
    PAIRS,
    POLICIES,
    SPLIT,
    SYNCS,
    Pair,
    Sections,
    Statement,
)

FEATURES = support()
BY_NAME = {one.name: one for one in FEATURES.FEATURES}
AT_ONCE = 1  # runs of one job, which has a deadline
SPREAD = (
    ("pipeline stages", "top-k"),
    ("unequal batch fractions", "local SGD"),
    ("ZeRO 2", "schedule-free AdamW"),
    ("SDP4Bit", "recompute"),
    ("int8 all-reduce", "gossip"),
    ("Eva", "cut cross-entropy"),
)


class Trained:
    """Runs that were trained, by their sections: each is trained once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._found: dict[str, list[dict[str, Any]]] = {}

    def train(self, runs: Sequence[Sections]) -> None:
        """Train those that were not yet."""
        wanted = {json.dumps(one, sort_keys=True): one for one in runs}
        left = [key for key in wanted if key not in self._found]
        for at in range(0, len(left), AT_ONCE):
            keys = left[at : at + AT_ONCE]
            ranks = self._pool.run("recipe.pair_jobs:losses", FEATURES.RANKS, runs=[wanted[key] for key in keys])
            self._found.update({key: [rank[n] for rank in ranks] for n, key in enumerate(keys)})

    def ranks(self, run: Sections) -> list[dict[str, Any]]:
        """Return what each rank gave."""
        return self._found[json.dumps(run, sort_keys=True)]

    def losses(self, run: Sections) -> list[float]:
        """Return the losses of the steps."""
        return list(self.ranks(run)[0]["losses"])


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Trained:
    return Trained(pool)


@cache
def pair_of(one: str, other: str) -> Pair | None:
    """Return the pair as it works, on islands of two ranks where islands train apart; None where it is refused."""
    features = (BY_NAME[one], BY_NAME[other])
    if FEATURES.one_key(*features):
        return None
    config = FEATURES.working(*features)[0]
    if config is None:
        return None
    fractions = config.plan.batch_fractions
    shares: Mapping[str, Sections] = {"unequal batch fractions": {"plan": {"batch_fractions": fractions}}}
    written = {f.name: shares.get(f.name, _here(f.sections)) for f in features}
    found = Pair((one, other), written, config.machines.islands)
    apart = Pair((one, other), written, PAIRS)
    return apart if {one, other} & {*SYNCS, *ISLANDS} and _is_planned(apart) else found


def _here(sections: Sections) -> Sections:
    """Return the sections of a feature with tiers, where there are any, in a directory of this process."""
    asked = sections.get("plan", {}).get("sharding")
    if not isinstance(asked, dict) or "tiers" not in asked:
        return sections
    there = {**asked["tiers"], "directory": f"{tempfile.gettempdir()}/gossamer-pairs-{os.getpid()}"}
    return {**sections, "plan": {**sections["plan"], "sharding": {"tiers": there}}}


def _is_planned(pair: Pair) -> bool:
    try:
        config = FEATURES.RunConfig.model_validate(pair.both)
        FEATURES.planner("data_parallel").plan(FEATURES.Request(config, FEATURES.RANKS))
    except FEATURES.BadInput:
        return False
    return True


def wrongs(pairs: Sequence[Pair], trained: Trained) -> Iterator[str]:
    """Yield what is wrong with each pair: losses that are not those of the reference, ranks that hold other numbers, a
    feature that changes nothing.
    """
    said = {pair: pair.statements() for pair in pairs}
    alone = {pair: [pair.alone(name) for name in pair.names] for pair in pairs}
    trained.train(
        [run for pair in pairs for run in (pair.both, *alone[pair])]
        + [run for each in said.values() for one in each for run in (one.measured, one.reference)]
    )
    for pair in pairs:
        name = " with ".join(pair.names)
        yield from (f"{name}: {wrong}" for one in said[pair] if (wrong := _departs(one, trained)))
        got = trained.losses(pair.both)
        if len(got) != 4 or not all(map(math.isfinite, got)):
            yield f"{name}: losses {got}"
        if len({rank["digest"] for rank in trained.ranks(pair.both)}) != 1:
            yield f"{name}: ranks end with other parameters"
        for own, other in (pair.names, pair.names[::-1]):
            if own in EXACT or own in SPLIT or own in POLICIES:
                continue
            if max(_apart(got, trained.losses(pair.alone(other)))) < 1e-7:
                yield f"{name}: {own} has no effect beside {other}"


def _departs(one: Statement, trained: Trained) -> str:
    got, wanted = ([*trained.ranks(run)[0][one.of]] for run in (one.measured, one.reference))
    if one.of == "losses":
        got, wanted = got[: one.steps], wanted[: one.steps]
    is_equal = bool(got) and len(got) == len(wanted) and max(_apart(got, wanted)) <= one.within
    return "" if is_equal else f"{one.of} {got}, wanted {wanted} to a part of {one.within:g}"


def _apart(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(one, other, strict=True)]


def test_a_spread_of_pairs_computes_what_both_promise(trained: Trained) -> None:
    pairs = [pair for names in SPREAD if (pair := pair_of(*names)) is not None]
    assert len(pairs) == len(SPREAD), "all of them work"
    assert not [*wrongs(pairs, trained)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(BY_NAME)[:-1])
def test_every_pair_computes_what_both_promise(trained: Trained, name: str) -> None:
    later = list(BY_NAME)[list(BY_NAME).index(name) + 1 :]
    assert not [*wrongs([pair for other in later if (pair := pair_of(name, other)) is not None], trained)]
