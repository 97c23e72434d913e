"""Adaptive policies: what they promise about bytes, errors and times, against brute force and by arithmetic."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch

from exchange import crew
from gossamer import exchange as exchange_methods
from gossamer import policy as policies
from gossamer.comm.bucket import Layout
from gossamer.comm.message import ProcessGroups
from gossamer.exchange._compression_error import error_of, errors_of, measure
from gossamer.p2p import activation
from gossamer.p2p.activation.none import NoCompression
from gossamer.p2p.activation.topk import TopKCompression
from gossamer.policy.ada_topk import AdaTopK, ratios
from gossamer.policy.bcrs import BCRS, fractions, sent
from gossamer.policy.l_greco import LGreco, cheapest
from gossamer.recipe import RegisteredSettings
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import Written
from gossamer.spec.network import Link
from gossamer.spec.statistics import Paths, Statistics

CANDIDATES = tuple({"topk": {"fraction": f}} for f in (0.005, 0.01, 0.02, 0.04))
DEFAULT = CANDIDATES[1]
NEAR = RegisteredSettings()


def table(rng: np.random.Generator, layers: int, candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors that fall and sizes that rise, by as much as real layers differ."""
    scale = np.exp(rng.normal(0, 1.5, (layers, 1)))
    error = scale * np.sort(rng.random((layers, candidates)))[:, ::-1]
    size = np.sort(rng.integers(1, 10**6, (layers, candidates)))
    return error, size.astype(np.float64)


def statistics(error: np.ndarray, size: np.ndarray, **more: object) -> Statistics:
    return Statistics(
        names=tuple(f"layer.{i}" for i in range(len(error))),
        candidates=CANDIDATES[: error.shape[1]],
        error=tuple(map(tuple, error.tolist())),
        nbytes=tuple(tuple(int(n) for n in row) for row in size),
        **more,
    )


def applied(rules: tuple[policies.AdaptRule, ...], name: str) -> object:
    return next(written for pattern, _, written in rules if re.search(pattern, name))


def chosen(one: LGreco, measured: Statistics) -> list[int]:
    rules = one.choose(measured, Paths()).rules
    return [measured.candidates.index(applied(rules, name)) for name in measured.names]


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_the_dynamic_programme_finds_what_trying_all_finds(layers: int, seed: int) -> None:
    """With the errors rounded to bins as it rounds them; the least size, not merely a small one."""
    error, size = table(np.random.default_rng(seed), layers, 4)
    bins, budget = 50, float(error[:, 1].sum())
    found = cheapest(error, size, 1, budget=budget, bins=bins)
    cost = np.maximum(1, np.ceil(error * (bins / budget)))
    rows = range(layers)
    sizes = [
        sum(size[at, c] for at, c in zip(rows, pick, strict=True))
        for pick in itertools.product(range(4), repeat=layers)
        if sum(cost[at, c] for at, c in zip(rows, pick, strict=True)) <= bins + layers
    ]
    assert found is not None
    assert size[rows, found].sum() == min(sizes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bins", [10, 100, 10_000])
def test_never_more_bytes_than_one_setting_for_all_and_never_more_error_than_the_budget(seed: int, bins: int) -> None:
    layers = 40
    error, size = table(np.random.default_rng(seed), layers, 4)
    found = chosen(LGreco(DEFAULT, bins=bins), statistics(error, size))
    rows = range(layers)
    assert size[rows, found].sum() <= size[:, 1].sum()
    assert error[rows, found].sum() <= error[:, 1].sum() * (1 + layers / bins) * (1 + 1e-12)


def test_it_sends_less_where_parameters_differ() -> None:
    error, size = table(np.random.default_rng(0), 40, 4)
    found = chosen(LGreco(DEFAULT), statistics(error, size))
    assert size[range(40), found].sum() < 0.9 * size[:, 1].sum()


def test_a_larger_budget_sends_no_more_and_one_that_nothing_meets_changes_nothing() -> None:
    error, size = table(np.random.default_rng(3), 12, 4)
    measured, rows = statistics(error, size), range(12)
    sizes = [size[rows, chosen(LGreco(DEFAULT, alpha=a), measured)].sum() for a in (1.0, 1.2, 1.5, 3.0)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]
    assert chosen(LGreco(DEFAULT, alpha=1e-9), measured) == [1] * 12


def test_one_candidate_is_one_setting_for_all() -> None:
    error, size = table(np.random.default_rng(1), 7, 1)
    choices = LGreco(CANDIDATES[0]).choose(statistics(error, size), Paths())
    assert choices.rules == ((".*", "all", CANDIDATES[0]),)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_default_that_cannot_be_judged_changes_nothing(bad: float) -> None:
    error, size = table(np.random.default_rng(1), 5, 4)
    error[2, 1] = bad
    choices = LGreco(DEFAULT).choose(statistics(error, size), Paths())
    assert choices.rules == ((".*", "all", DEFAULT),) and "cannot be judged" in choices.reason


def test_a_candidate_that_cannot_be_judged_is_not_taken() -> None:
    error, size = table(np.random.default_rng(2), 5, 4)
    error[:, 0], size[:, 0] = math.nan, 0
    assert 0 not in chosen(LGreco(DEFAULT, alpha=5.0), statistics(error, size))


def test_parameters_without_error_take_a_bin_each() -> None:
    """A gradient of zeros (a frozen or unused parameter) costs nothing to lose; it must not divide by zero either."""
    error, size = table(np.random.default_rng(2), 5, 4)
    error[[0, 3]] = 0
    found = chosen(LGreco(DEFAULT), statistics(error, size))
    assert found[0] == found[3] == 0
    assert LGreco(DEFAULT).choose(statistics(error * 0, size), Paths()).rules == ((".*", "all", DEFAULT),)


def test_of_candidates_of_one_size_the_one_that_loses_least_is_taken() -> None:
    found = cheapest(np.array([[3.0, 2.0, 1.0]]), np.array([[8.0, 8.0, 8.0]]), 0, budget=3.0, bins=100)
    assert found == [2]


def test_bytes_that_nobody_waits_for_count_less() -> None:
    """Where only the first parameter's bytes are waited for, savings are made there."""
    error = np.array([[4.0, 2.0, 1.0, 0.5]] * 2)
    size = np.array([[10.0, 20.0, 40.0, 80.0]] * 2)
    found = chosen(LGreco(DEFAULT, alpha=1.5), statistics(error, size, exposed=(1.0, 0.1)))
    assert found[0] < found[1]


def test_names_are_taken_literally() -> None:
    measured = Statistics(
        names=("a.b", "axb"), candidates=CANDIDATES[:2], error=((9.0, 1.0), (1.0, 1.0)), nbytes=((1, 2), (1, 2))
    )
    rules = LGreco(DEFAULT).choose(measured, Paths()).rules
    assert applied(rules, "a.b") == DEFAULT and applied(rules, "axb") == CANDIDATES[0]


def test_a_default_that_was_not_measured_is_refused() -> None:
    error, size = table(np.random.default_rng(1), 5, 4)
    with pytest.raises(BadInput, match="among the candidates"):
        LGreco("int8").choose(statistics(error, size), Paths())


def up(*rates: float, latency_s: float = 0.001) -> tuple[Link, ...]:
    return tuple(Link(latency_s=latency_s, bytes_per_s=r) for r in rates)


MBIT = 125_000.0
UNEQUAL = up(8 * MBIT, 20 * MBIT, 100 * MBIT, 1000 * MBIT)


def finish(kept: tuple[float, ...], numel: int, links: tuple[Link, ...]) -> list[float]:
    return [link.seconds(3 * numel * sent(c)) for c, link in zip(kept, links, strict=True)]


def test_uploads_end_together_and_the_slowest_keeps_the_base() -> None:
    numel, base = 10**6, 0.01
    kept = fractions(base, numel, Paths(up=UNEQUAL))
    assert kept[0] == pytest.approx(base) and min(kept) == kept[0]
    times = finish(kept, numel, UNEQUAL)
    not_dense = [t for t, c in zip(times, kept, strict=True) if c < 1]
    assert len(not_dense) == 3 and max(not_dense) / min(not_dense) == pytest.approx(1.0)
    assert kept[3] == 1.0 and times[3] <= times[0], "a rank whose link carries everything sends everything"
    assert kept == tuple(sorted(kept)), "a faster link never gets less"


def test_latency_is_time_too() -> None:
    links = (*up(8 * MBIT, latency_s=0.0), *up(8 * MBIT, 80 * MBIT, latency_s=0.2), *up(80 * MBIT, latency_s=0.0))
    kept = fractions(0.01, 10**5, Paths(up=links))
    assert kept[1] == pytest.approx(0.01) and kept[0] > kept[1] and kept[3] > kept[2]
    times = finish(kept, 10**5, links)
    assert max(times) == pytest.approx(min(t for t, c in zip(times, kept, strict=True) if c < 1))


def test_equal_links_and_a_base_of_everything_change_nothing() -> None:
    assert fractions(0.01, 1000, Paths(up=up(1e6, 1e6, 1e6))) == pytest.approx((0.01,) * 3)
    assert fractions(1.0, 1000, Paths(up=UNEQUAL)) == (1.0,) * 4
    assert fractions(0.01, 1000, Paths(up=up(1e6))) == (0.01,)
    assert fractions(0.01, 0, Paths(up=UNEQUAL)) == (0.01,) * 4


def test_a_narrow_way_in_holds_everybody_back() -> None:
    """All ranks receive what all send: symmetric links win nothing, wide ways in all, between them some."""
    numel, base = 10**6, 0.01
    free = fractions(base, numel, Paths(up=UNEQUAL))
    assert fractions(base, numel, Paths(up=UNEQUAL, down=UNEQUAL)) == pytest.approx((base,) * 4)
    wide = up(*([1e12] * 4))
    assert fractions(base, numel, Paths(up=UNEQUAL, down=wide)) == free
    ways_in = up(80 * MBIT, 200 * MBIT, 1000 * MBIT, 1000 * MBIT)
    some = fractions(base, numel, Paths(up=UNEQUAL, down=ways_in))
    assert sum(some) < sum(free) and some[3] > 2 * base
    end = max(finish((base,) * 4, numel, UNEQUAL))
    for rank, link in enumerate(ways_in):
        arriving = sum(sent(c) for i, c in enumerate(some) if i != rank)
        assert link.seconds(arriving * numel) <= end * (1 + 1e-9)


def test_a_way_in_slower_than_all_ways_out_says_how_long_a_round_takes() -> None:
    """Rank 1 receives at a tenth of what rank 0 sends at: by then all could send more, but nothing more can arrive."""
    out, into = up(1e6, 5e6), up(1e9, 1e5)
    assert fractions(0.01, 100_000, Paths(up=out, down=into)) == pytest.approx((0.01, 0.01))
    assert fractions(0.01, 100_000, Paths(up=out, down=up(1e9, 1e9))) == pytest.approx((0.01, 0.05))


def test_what_it_writes_is_an_exchange_that_sends_as_said() -> None:
    measured = Statistics(names=("w",), numel=(10_000,))
    choices = BCRS().choose(measured, Paths(up=UNEQUAL))
    ((_, level, written),) = choices.rules
    assert level == "all" and "all there when" in choices.reason
    one, where = exchange_methods.build(written), Layout.of({"w": torch.empty(10_000)})
    sizes = [one.traffic(where, ProcessGroups.flat(4), r)[0].nbytes for r in range(4)]
    times = [link.seconds(n) for link, n in zip(UNEQUAL[:3], sizes, strict=False)]
    assert max(times) / min(times) < 1.05


def test_when_all_can_send_everything_it_says_dense() -> None:
    choices = BCRS(fraction=0.5).choose(Statistics(names=("w",), numel=(100,)), Paths(up=UNEQUAL))
    assert choices.rules == ((".*", "all", {"error_feedback": "dense"}),)
    assert exchange_methods.build(choices.rules[0][2])


def test_what_feedback_would_take_back_is_refused() -> None:
    with pytest.raises(BadInput, match="feedback"):
        BCRS(gamma=2.0)
    bare = BCRS(gamma=2.0, overlap_max_senders=2, feedback="").choose(
        Statistics(names=("w",), numel=(100,)), Paths(up=UNEQUAL)
    )
    one = exchange_methods.build(bare.rules[0][2])
    assert (one.gamma, one.overlap_max_senders) == (2.0, 2)


def test_slower_links_send_less_and_the_slowest_the_least() -> None:
    seconds = {"0>1": 0.01, "1>2": 0.2, "2>3": 1.0, "3>4": 0.5}
    found = ratios(seconds, 8.0, 2.0)
    assert found["2>3"] == max(found.values()) == 16.0
    by_time = sorted(seconds, key=seconds.__getitem__)
    assert [found[link] for link in by_time] == sorted(found.values())
    assert found["0>1"] == 1.0, "a link that is fast enough is left alone"
    assert ratios(dict.fromkeys("ab", 1.0), 1.0, 2.0) == {"a": 1.0, "b": 1.0}, "ratio 1 is dense everywhere"


def test_no_compressed_link_sends_more_than_dense_would() -> None:
    for r in (1.0, 1.5, 4.0, 20.0):
        for ratio in ratios({"a": 1.0, "b": 0.6, "c": 0.1}, r, 2.0).values():
            assert ratio == 1.0 or 2.0 / ratio < 1.0


def test_rules_by_link() -> None:
    paths = Paths(between={"0>1": up(MBIT)[0], "1>2": up(1000 * MBIT)[0]})
    measured = Statistics(names=(), crossing={"0>1": 10**6, "1>2": 10**6})
    choices = AdaTopK(ratio=10).choose(measured, paths)
    assert choices.rules == (
        (".*", "0>1", {"topk": {"fraction": 0.05}}),
        (".*", "1>2", "none"),
        (".*", "all", "none"),
    )
    assert choices.reason.startswith("1 of 2 links compressed, the slowest by 10")
    assert AdaTopK().choose(Statistics(names=()), Paths()).rules == ((".*", "all", "none"),)
    assert [activation.build(written) for _, _, written in choices.rules[:2]] == [
        TopKCompression(fraction=0.05),
        NoCompression(),
    ]


@pytest.mark.parametrize("written", [{"topk": {"fraction": 0.1}}, {"error_feedback": {"topk": {"fraction": 0.1}}}])
def test_the_error_measured_is_what_the_exchange_loses(written: dict[str, object]) -> None:
    x = torch.randn(40, 25, generator=torch.Generator().manual_seed(3))
    given = x.clone()
    lost = torch.sort(x.abs().flatten()).values[:900]
    assert error_of(exchange_methods.build(written), x) == pytest.approx(float(lost.norm()), rel=1e-5)
    assert torch.equal(x, given)


@pytest.mark.parametrize("name", exchange_methods.names())
def test_every_exchange_can_be_measured(name: str) -> None:
    """Also those with memory, with islands, with several rounds: alone, each is what it does to the gradient."""
    x = torch.randn(48, 40, generator=torch.Generator().manual_seed(5))
    given, one = x.clone(), crew.example(name)
    error = error_of(one, x)
    assert torch.equal(x, given) and math.isfinite(error)
    assert error == error_of(one, x), "the same on every rank"
    if one.traits.lossless:
        assert error <= 1e-6 * float(x.norm())
    delta = one.contraction(Layout.of({"x": x}))
    if delta is not None and not one.traits.remembers:
        assert error**2 <= (1 - delta) * float(x.norm()) ** 2 * (1 + 1e-4) + 1e-9


def test_the_error_of_what_loses_nothing_is_nothing() -> None:
    x = torch.randn(7, 3)
    assert error_of(exchange_methods.build("dense"), x) == 0.0
    assert error_of(exchange_methods.build({"topk": {"fraction": 1.0}}), x.bfloat16()) == 0.0
    assert math.isnan(error_of(exchange_methods.build("dense"), torch.full((3,), math.nan)))
    assert error_of(exchange_methods.build("dense"), torch.empty(0)) == 0.0


@pytest.mark.parametrize("written", [{"two_shot": "int8"}, {"two_shot": {"cast": {"dtype": "bfloat16"}}}, "dense"])
def test_the_errors_of_tensors_in_one_bucket_are_those_of_each(written: Written) -> None:
    """Blocks of 256 numbers are whole in every tensor here, so none shares a scale with the next one."""
    torch.manual_seed(3)
    tensors = {f"t{i}": torch.randn(256 * i) * 10.0**-i for i in range(4)}
    one = exchange_methods.build(written)
    found = errors_of(one, tensors)
    assert list(found) == list(tensors)
    for name, x in tensors.items():
        assert found[name] == pytest.approx(error_of(one, x), rel=1e-5)


def test_what_is_measured_can_be_decided_by() -> None:
    rng = torch.Generator().manual_seed(0)
    heavy = torch.randn(64, 64, generator=rng) ** 9
    gradients = {"heavy": heavy / heavy.norm(), "flat": torch.randn(64, 64, generator=rng)}
    built = [(w, exchange_methods.build(w)) for w in CANDIDATES]
    measured = measure(built, gradients, ProcessGroups.flat(2))
    assert measured.nbytes[0] == tuple(8 * round(f * 4096) for f in (0.005, 0.01, 0.02, 0.04))
    assert all(list(row) == sorted(row, reverse=True) for row in measured.error)
    found = chosen(LGreco(DEFAULT, alpha=1.02), measured)
    assert found[0] == 0, "what a few entries carry needs no more of them"
    assert measure(built, gradients, ProcessGroups.flat(2)) == measured


def test_settings_near_the_one_a_run_has() -> None:
    """What is around them stays; without neighbors there is nothing to choose."""
    fed, alone = {"error_feedback": {"powersgd": {"rank": 4}}}, {"two_shot": {"codec": {"int8": {"stochastic": True}}}}
    ranks = [exchange_methods.build(w).inner.rank for w in LGreco().to_measure(fed, NEAR)]
    assert ranks == [4, 2, 3, 6, 8]
    built = [exchange_methods.build(w) for w in LGreco().to_measure(alone, NEAR)]
    assert [type(one.codec).__name__ for one in built] == ["Int8", "Int4", "Cast"] and built[1].codec.stochastic
    across = {"hierarchical": {"inter": {"error_feedback": "powersgd"}}}
    assert [exchange_methods.build(w).inter.inner.rank for w in LGreco().to_measure(across, NEAR)] == [4, 2, 3, 6, 8]
    assert LGreco().to_measure("dense", NEAR) == LGreco().to_measure("topk", NEAR) == ()
    assert BCRS().to_measure(fed, NEAR) == AdaTopK().to_measure(fed, NEAR) == ()


def test_candidates_of_the_user_hold_where_the_exchange_is_among_them() -> None:
    given = LGreco(candidates=(CANDIDATES[0], {"topk": {"fraction": 0.010}}))
    assert given.to_measure({"topk": {}}, NEAR) == ({"topk": {}}, CANDIDATES[0]), "the same method, written otherwise"
    assert given.to_measure("dense", NEAR) == ()
    assert LGreco(DEFAULT, candidates=CANDIDATES).to_measure("dense", NEAR) == (
        DEFAULT,
        *CANDIDATES[:1],
        *CANDIDATES[2:],
    )


def test_without_a_default_it_is_what_the_run_has() -> None:
    error, size = table(np.random.default_rng(4), 6, 4)
    measured = statistics(error, size, default=DEFAULT)
    assert LGreco().choose(measured, Paths()) == LGreco(DEFAULT).choose(measured, Paths())


def test_the_room_is_like_the_others() -> None:
    assert policies.names() == ("ada_topk", "bcrs", "l_greco")
    one = policies.build({"l_greco": {"default": "int8", "alpha": 1.1}})
    assert one == LGreco("int8", alpha=1.1)
    for wrong in (
        {"l_greco": {"default": "int8", "alpha": 0}},
        {"bcrs": {"fraction": 2}},
        {"ada_topk": {"ratio": 0.5}},
    ):
        with pytest.raises(BadInput):
            policies.build(wrong)
