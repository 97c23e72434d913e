"""What a step waits for rows of sharded states, beside its gradients, by hand-made sums."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from gossamer.comm.message import ProcessGroups
from gossamer.plan import gather_wait_seconds
from gossamer.plan.exchange import MessagePrice
from gossamer.recipe import PlanMethods
from gossamer.sharding import UnshardOrder
from gossamer.spec.network import Link, Network
from gossamer.spec.plan import MeshSizes, Plan

RATE, LATENCY_S = 1e6, 0.01
LINK = Link(latency_s=LATENCY_S, bytes_per_s=RATE, hop_s=LATENCY_S)
TWO = Network(islands=((0, 1),), levels={"all": LINK})
UNITS, WIDE = 5, 100
MODEL = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(UNITS)))
SHAPES = tuple((name, tuple(p.shape)) for name, p in MODEL.named_parameters())
UNIT_S = WIDE * WIDE * 4 / 2 / RATE  # half of a unit's rows come from the other rank


def waited_s(
    sharding: Any,
    *,
    compute_s: float = 0.0,
    microbatches: int = 1,
    units: int = UNITS,
    links: Network = TWO,
    price: MessagePrice = MessagePrice(),  # noqa: B008
) -> float:
    ranks = sum(map(len, links.islands))
    levels = ProcessGroups.islands(links.islands) if links.has_islands else ProcessGroups.flat(ranks)
    each = {"batch_fractions": (1.0,) * ranks, "rows": (2,) * ranks, "microbatches": (microbatches,) * ranks}
    methods = PlanMethods.of(Plan(mesh=MeshSizes(replica=ranks), sharding=sharding, exchange="dense", **each))
    walk = UnshardOrder.of(MODEL, [str(i) for i in range(units)]) if methods.sharding.takes_parameters else None
    return gather_wait_seconds(methods, SHAPES, levels, links, price=price, compute_s=compute_s, walk=walk)


def test_nothing_is_waited_for_where_every_rank_has_everything() -> None:
    assert waited_s("none", compute_s=1.0) == 0.0


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_updated_rows_are_waited_for_whatever_is_computed(sharding: str) -> None:
    for compute_s in (0.0, 100.0):
        assert waited_s(sharding, compute_s=compute_s) == pytest.approx(UNITS * UNIT_S + LATENCY_S)


def test_a_message_takes_the_processor_too() -> None:
    price = MessagePrice(start_s=0.5)
    assert waited_s("zero1", price=price) == pytest.approx(waited_s("zero1") + 0.5)
    assert waited_s("zero3", price=price) > waited_s("zero3") + 0.5


def test_units_that_compute_nothing_are_waited_for_one_after_the_other() -> None:
    """Every unit comes for forward, and all but the last two again for backward."""
    gathers = UNITS + UNITS - 2
    assert waited_s("zero3") == pytest.approx(gathers * (UNIT_S + LATENCY_S), rel=0.25)
    assert waited_s("zero3") >= gathers * UNIT_S
    assert waited_s("zero3", microbatches=2) == pytest.approx(2 * waited_s("zero3"), rel=0.15)


def test_units_come_while_others_run() -> None:
    """A step that computes long waits for the first unit alone, one that computes a little for what is left."""
    assert waited_s("zero3", compute_s=100.0) == pytest.approx(UNIT_S + LATENCY_S)
    twice_s = waited_s("zero3", compute_s=0.2, microbatches=2)
    assert twice_s == pytest.approx(2 * waited_s("zero3", compute_s=0.1), rel=0.15)
    waits = [waited_s("zero3", compute_s=seconds) for seconds in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)]
    assert waits == sorted(waits, reverse=True) and waits[0] > waits[2] > waits[-1]


def test_a_backward_pass_hides_more_than_a_forward_pass() -> None:
    """Of 3 s of computing five units have 0.2 s each forward and 0.4 s backward: a gather of 0.3 s hides in one."""
    slow = Link(latency_s=0.0, bytes_per_s=WIDE * WIDE * 2 / 0.3, hop_s=0.0)
    links = Network(islands=((0, 1),), levels={"all": slow})
    assert waited_s("zero3", compute_s=3.0, links=links) == pytest.approx(0.3 + 4 * 0.1)


def test_what_lies_in_no_unit_comes_before_everything() -> None:
    """With one unit of five, four layers are there for the whole step."""
    assert waited_s("zero3", units=1, compute_s=100.0) == pytest.approx(5 * UNIT_S, rel=0.3)
    assert waited_s("zero3", units=0, compute_s=100.0) == pytest.approx(5 * UNIT_S + LATENCY_S)


def test_rows_inside_islands_do_not_cross_slow_links() -> None:
    slow, fast = Link(latency_s=0.01, bytes_per_s=1e5, hop_s=0.01), Link(latency_s=0.0, bytes_per_s=1e9, hop_s=0.0)
    pairs = Network(islands=((0, 1), (2, 3)), levels={"all": slow, "between": slow, "island": fast})
    inside, everywhere = waited_s({"zero1": {"shard_group": "island"}}, links=pairs), waited_s("zero1", links=pairs)
    assert inside < 0.01 * everywhere
    updated: Any = {"zero3": {"weights_group": "island"}}
    assert waited_s(updated, links=pairs) == pytest.approx(everywhere, rel=0.05), "rows of states on all islands"
    across_s = UNITS * WIDE * WIDE * 4 / 4 / 1e5  # each rank's half: its counterpart has half of that
    assert everywhere == pytest.approx(across_s + 0.01, rel=0.05)
