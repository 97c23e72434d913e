"""State that one rank of an island keeps for all of it, as buckets, islands and ranks change: no residual is lost, and
all ranks go on with one mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import Collective, ExchangeContext, Message, ProcessGroups
from gossamer.exchange import is_residual
from gossamer.run.checkpoint.stored import merged
from gossamer.sharding._hierarchical_reduce_scatter import HierarchicalReduceScatter
from gossamer.sync._gradient_buckets import GradientBuckets, buckets_of

SHAPES = {"a": (6,), "b": (6,), "c": (6,), "d": (6,)}
TOPK = {"error_feedback": {"topk": {"fraction": 0.2}}}
OWES, PAYS = {"hierarchical": {"inter": TOPK}}, {"hierarchical": {"inter": {"error_feedback": "dense"}}}
PAIRS, OTHERS = ProcessGroups.islands([[0, 1], [2, 3]]), ProcessGroups.islands([[0, 2], [1, 3]])
THREES = ProcessGroups.islands([[0, 1, 2], [3, 4, 5]])
ONE, SWAPPED, APART = [["a", "b", "c", "d"]], [["c", "d", "a", "b"]], [["a"], ["d", "b"], ["c"]]


def ranks_of(
    count: int, written: Any, named: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> list[GradientBuckets]:
    found = []
    for _ in range(count):
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        one = GradientBuckets(params, holdings={}, gives_back=False)
        cut_anew(one, written, named)
        found.append(one)
    return found


def cut_anew(one: GradientBuckets, written: Any, named: Sequence[Sequence[str]]) -> None:
    exchange = written if isinstance(written, exchange_methods.Exchange) else exchange_methods.build(written)
    one.replace_buckets(buckets_of(one.params, dict.fromkeys(one.params, exchange), bucket_bytes=1 << 20, named=named))


def to_owners(ranks: Sequence[GradientBuckets], levels: ProcessGroups) -> None:
    """As GradientReducer does, each rank in a thread of its own."""

    def of_rank(channel: LocalChannel) -> None:
        def total(mine: Tensor) -> Tensor:
            return channel.start(Message((mine,), Collective.SUM, "island")).wait()[0]

        ranks[channel.rank].to_owners(levels, channel.rank, total)

    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(of_rank, LocalChannel.world(len(ranks), levels, patience_s=20.0)))


def step(ranks: Sequence[GradientBuckets], levels: ProcessGroups, given: Callable[[int, str], Tensor], key: int) -> Any:
    """One step; the means by rank."""
    count = len(ranks)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for index in range(len(ranks[0].slots)):
        methods = []
        for rank, one in enumerate(ranks):
            slot = one.slots[index]
            for name, view in slot.bucket.slices():
                view.copy_(given(rank, name))
            at = ExchangeContext(rank, levels, weights, (1, key), 1.0, accounts=False)
            methods.append(slot.run(slot.bucket, slot.exchange, at))
        for one, outcome in zip(ranks, run_lockstep(LocalChannel.world(count, levels), methods), strict=True):
            one.slots[index].receive(outcome)
    for one in ranks:
        one.commit()
    return [{name: mean.clone() for name, mean in one.gradients().items()} for one in ranks]


def noise(rank: int, name: str) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(100 * rank + ord(name)))


def nothing(rank: int, name: str) -> Tensor:
    return torch.zeros(6)


def check_paid(first: dict[str, Tensor], ranks: Sequence[GradientBuckets], levels: ProcessGroups) -> None:
    """What the first step owed of four ranks is in the mean of the next, in full."""
    second = step(ranks, levels, nothing, 1)[0]
    for name in SHAPES:
        torch.testing.assert_close(first[name] + second[name], sum(noise(r, name) for r in range(4)) / 4)


@pytest.mark.parametrize("owes", [OWES, TOPK], ids=["between islands", "among all"])
@pytest.mark.parametrize("named", [ONE, SWAPPED, APART], ids=["as before", "swapped", "apart"])
@pytest.mark.parametrize("levels", [PAIRS, OTHERS], ids=["same islands", "other islands"])
def test_what_is_owed_goes_to_those_who_send_it(owes: Any, named: Any, levels: ProcessGroups) -> None:
    ranks = ranks_of(4, owes, ONE)
    first = step(ranks, PAIRS, noise, 0)[0]
    for one in ranks:
        held = one.states()
        cut_anew(one, PAYS, named)
        one.carry_over(held)
    to_owners(ranks, levels)
    check_paid(first, ranks, levels)


def test_what_is_owed_goes_on_among_other_ranks() -> None:
    ranks = ranks_of(4, OWES, ONE)
    first = step(ranks, PAIRS, noise, 0)[0]
    saved = [one.states() for one in ranks]

    class Source:
        def read_whole(self, name: str, rank: int) -> Tensor:
            return saved[rank][name]

    after = ranks_of(6, PAYS, ONE)
    for one in after:
        one.restore({n: merged(Source(), n, 4, 6) for n in saved[0] if is_residual(n)})  # type: ignore[arg-type]
    to_owners(after, THREES)
    check_paid(first, after, THREES)


@pytest.mark.parametrize("inner", ["ef21", "delta_reference"])
def test_what_islands_estimate_starts_anew_where_others_keep_it(inner: Any) -> None:
    """So all ranks go on with one mean. Residuals are not among it."""
    ranks = ranks_of(4, {"hierarchical": {"inter": {inner: {"topk": {"fraction": 0.5}}}}}, ONE)
    for key in range(3):
        step(ranks, PAIRS, noise, key)
    saved = [one.states() for one in ranks]
    names = ranks[0].kept_by_owners(PAIRS, 0)
    assert names and not any(map(is_residual, names)) and set(names) <= set(saved[0])
    assert ranks[0].kept_by_owners(PAIRS, 0, but={tuple(ONE[0])}) == []
    for one, held in zip(ranks, saved, strict=True):
        one.restore({name: tensor for name, tensor in held.items() if name not in names})
    means = step(ranks, OTHERS, noise, 3)
    for mean in means[1:]:
        assert all(torch.equal(mean[name], means[0][name]) for name in SHAPES)


MASKED = {"static_mask": {"sparsity": 0.5, "seed": 1, "inner": OWES}}
WARM = {"warmup": {"inner": OWES}}
BY_ROWS = HierarchicalReduceScatter(exchange_methods.build(TOPK))


@pytest.mark.parametrize("written", [OWES, MASKED, {"momentum": {"inner": OWES}}, WARM, BY_ROWS], ids=str)
def test_a_rank_owes_what_it_owns_and_nothing_else(written: Any) -> None:
    """Whatever is around the exchange between islands: else residuals would be taken from those who send them. Half of
    the matrix is masked, so the bucket is cut elsewhere than a whole one.
    """
    shapes, numel = {"a": (4, 8), "b": (12,), "c": (12,), "d": (8,)}, 0
    ranks = ranks_of(4, written, ONE, shapes)

    def given(rank: int, name: str) -> Tensor:
        return torch.randn(shapes[name], generator=torch.Generator().manual_seed(100 * rank + ord(name)))

    step(ranks, PAIRS, given, 0)
    for rank, one in enumerate(ranks):
        for slot in one.slots:
            tensors = dict(slot.state.flatten())
            for path, mine in slot.exchange.owned(slot.layout, PAIRS, rank).items():
                (owed,) = [t for name, t in tensors.items() if name.startswith(f"{path}/") and is_residual(name)]
                assert owed.shape == mine.shape and not owed[~mine].any()
                numel += int(owed[mine].count_nonzero())
    assert numel > 0, "nothing is owed: this proves nothing"


def test_all_other_exchanges_keep_their_own() -> None:
    for written in (TOPK, {"powersgd": {"rank": 2}}, "dense"):
        assert ranks_of(1, written, ONE)[0].kept_by_owners(PAIRS, 0) == []


def test_what_a_step_of_an_island_owes_is_paid_once_by_all() -> None:
    """Local steps and steps of all ranks take turns (0/1 Adam, a warm-up): one residual serves both."""
    ranks = ranks_of(4, {"error_feedback": {"topk": {"fraction": 0.25}}}, ONE)

    def meet(level: str, given: Callable[[int, str], Tensor], key: int) -> Tensor:
        levels = PAIRS if level == "all" else PAIRS.only(level)
        share, part = (0.25, 1.0) if level == "all" else (0.5, 0.5)
        methods = []
        for rank, one in enumerate(ranks):
            (slot,) = one.slots
            for name, view in slot.bucket.slices():
                view.copy_(given(rank, name))
            weights = torch.full((4,), share, dtype=torch.float64)
            at = ExchangeContext(rank, levels, weights, (1, key), 1.0, accounts=False)
            methods.append(slot.run(slot.bucket, slot.exchange, at, part=part))
        outcomes = run_lockstep(LocalChannel.world(4, levels), methods)
        for one, outcome in zip(ranks, outcomes, strict=True):
            one.slots[0].receive(outcome)
            one.commit()
        return torch.stack([outcome.mean for outcome in outcomes]).mean(0)  # islands meet in their mean

    wanted = torch.cat([sum(noise(r, name) for r in range(4)) for name in SHAPES]) / 4
    moved = meet("island", noise, 0) + meet("all", noise, 1) + meet("island", noise, 2)
    for key in range(3, 12):
        moved = moved + meet("all", nothing, key)
    torch.testing.assert_close(moved, 3 * wanted, rtol=1e-4, atol=1e-5)


def test_masked_gradients_meet_inside_an_island_too() -> None:
    """In a local step the exchange of the mask keeps its state; one that needs islands has none there."""
    mask = {"sparsity": 0.5, "seed": 1}
    flat, between = ({"static_mask": {**mask, "inner": inner}} for inner in (TOPK, OWES))
    for written, keeps in ((flat, True), (between, False)):
        one = exchange_methods.build(written)
        assert (one.for_island() is one) == keeps
        ranks = ranks_of(4, written, ONE)
        levels, methods = PAIRS.only("island"), []
        for rank, buckets in enumerate(ranks):
            (slot,) = buckets.slots
            for name, view in slot.bucket.slices():
                view.copy_(noise(rank, name))
            at = ExchangeContext(rank, levels, torch.full((4,), 0.5, dtype=torch.float64), (1, 0), 1.0, accounts=False)
            methods.append(slot.run(slot.bucket, slot.exchange.for_island(), at, part=0.5))
        means = [outcome.mean for outcome in run_lockstep(LocalChannel.world(4, levels), methods)]
        assert torch.equal(means[0], means[1]) and means[0].any() and not torch.equal(means[0], means[2])


ALONE = ProcessGroups.islands([[0], [1], [2], [3]])
IN_UNITS = {"error_feedback": {"inner": {"topk": {"fraction": 0.2}}, "track_lr": False}}
BEFORE: dict[str, tuple[Any, Any]] = {  # and the same exchange without loss
    "error_feedback": (TOPK, "dense"),
    "without the rate": (IN_UNITS, "dense"),
    "low rank": ({"error_feedback": {"powersgd": {"rank": 1}}}, "dense"),
    "econtrol": ({"econtrol": {"inner": {"topk": {"fraction": 0.2}}}}, "dense"),
    "warm-up": ({"warmup": {"inner": TOPK}}, "dense"),
    "between islands": (OWES, "dense"),
    "momentum": ({"momentum": {"inner": IN_UNITS}}, "dense"),
    "rows": (BY_ROWS, HierarchicalReduceScatter(exchange_methods.build("dense"))),
    "masked": tuple({"static_mask": {"sparsity": 0.5, "seed": 1, "inner": one}} for one in (TOPK, "dense")),
}


@pytest.mark.parametrize(
    ("name", "islands"),
    [*(pytest.param(name, ALONE, id=name) for name in BEFORE), ("between islands", PAIRS), ("rows", PAIRS)],
)
def test_what_is_owed_when_ranks_part_is_paid_by_the_dense_step_in_its_place(name: str, islands: ProcessGroups) -> None:
    """Once, in the first step that takes effect and has a rate; the mean of the islands is then that without loss."""
    shapes, lr = {"a": (4, 8), "b": (12,)}, 0.5

    def given(rank: int, name: str) -> Tensor:
        return torch.randn(shapes[name], generator=torch.Generator().manual_seed(100 * rank + ord(name)))

    def meet(ranks: Sequence[GradientBuckets], level: str, key: int, lr: float, *, is_lost: bool = False) -> Tensor:
        levels = islands if level == "all" else islands.only(level)
        members = len(levels.groups["all"][0])
        methods = []
        for rank, one in enumerate(ranks):
            (slot,) = one.slots
            for name, view in slot.bucket.slices():
                view.copy_(given(rank, name) if level == "all" else torch.zeros(shapes[name]))
            weights = torch.full((4,), 1 / members, dtype=torch.float64)
            at = ExchangeContext(rank, levels, weights, (1, key), lr, accounts=False)
            inside = slot.exchange.for_island() if members > 1 else exchange_methods.build("dense")
            methods.append(slot.run(slot.bucket, slot.exchange if level == "all" else inside, at, part=members / 4))
        outcomes = run_lockstep(LocalChannel.world(4, levels), methods)
        for one, outcome in zip(ranks, outcomes, strict=True):
            one.slots[0].receive(outcome)
            one.reject() if is_lost else one.commit()
        apart = len(islands.groups["island"][0]) if name == "rows" else 1  # each rank has the mean of its own rows
        return torch.stack([outcome.mean for outcome in outcomes]).mean(0) * apart

    lossy, exact = BEFORE[name]
    ranks = ranks_of(4, lossy, [["a", "b"]], shapes)
    wanted = meet(ranks_of(4, exact, [["a", "b"]], shapes), "all", 0, lr)
    first = meet(ranks, "all", 0, lr)
    assert not torch.allclose(first, wanted, atol=1e-3), "nothing is owed: this proves nothing"
    if name not in ("without the rate", "momentum"):
        assert not meet(ranks, "island", 1, 0.0).any(), "a step without a rate moves nothing, and pays nothing"
    meet(ranks, "island", 2, lr, is_lost=True)
    torch.testing.assert_close(first + meet(ranks, "island", 3, lr), wanted, rtol=1e-5, atol=1e-6)
    assert not meet(ranks, "island", 4, lr).any(), "it is paid"
    for one in ranks:
        assert not any(t.any() for n, t in one.states().items() if is_residual(n))
