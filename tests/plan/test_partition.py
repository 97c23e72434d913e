"""Where states lie: the least wait that fits, on two sites with one slow line between them."""

from __future__ import annotations

import pytest

from gossamer.comm.message import ProcessGroups
from gossamer.plan import ShardingPlace, least_wait, places_of_states
from gossamer.plan._sharding_groups import tasks_of_gathers
from gossamer.spec.clock import cost, play
from gossamer.spec.errors import NoPlan
from gossamer.spec.network import Link, Network

SHAPES = tuple((f"layer.{i}", (512, 256)) for i in range(4))
NUMBERS = 4 * 512 * 256
ISLANDS = ((0, 1), (2, 3))
FAST, SLOW = Link(latency_s=1e-4, bytes_per_s=1e9), Link(latency_s=1e-3, bytes_per_s=6e6)
LINKS = Network(islands=ISLANDS, levels={"all": SLOW, "between": SLOW, "island": FAST})


def places(hidden_s: float = 0.0) -> tuple[ShardingPlace, ...]:
    levels = ProcessGroups.islands(ISLANDS)
    return places_of_states(SHAPES, levels, LINKS, number_bytes=8, bucket_bytes=1 << 20, hidden_s=hidden_s)


def test_what_every_place_costs() -> None:
    """Whole states cross with all numbers; in two hops half as many; of states on each island nothing crosses after."""
    whole, island, everywhere = places()
    assert [p.held_bytes for p in (whole, island, everywhere)] == [8 * NUMBERS, 4 * NUMBERS, 2 * NUMBERS]
    line_s = NUMBERS * 4 / SLOW.bytes_per_s
    assert whole.seconds == pytest.approx(1.5 * line_s, rel=0.2)
    assert island.seconds == pytest.approx(0.5 * line_s, rel=0.2)
    assert everywhere.seconds == pytest.approx(0.5 * line_s, rel=0.2)
    _, island, everywhere = places(hidden_s=10.0)
    assert island.seconds < 0.05 * everywhere.seconds  # under the backward pass go gradients alone


@pytest.mark.parametrize(
    ("room", "hidden_s", "chosen"),
    [
        (8 * NUMBERS, 10.0, "none"),
        (5 * NUMBERS, 10.0, {"zero1": {"shard_group": "island"}}),
        (3 * NUMBERS, 10.0, "zero1"),
        (8 * NUMBERS, 0.0, "zero1"),
    ],
)
def test_the_least_wait_that_fits(room: int, hidden_s: float, chosen: object) -> None:
    assert least_wait({"rule": places(hidden_s)}, room_bytes=room)["rule"].written == chosen


def test_states_share_the_room() -> None:
    """Memory goes where it saves most; of equal waits to the smaller."""
    first = (ShardingPlace("none", 0.0, 4), ShardingPlace("zero1", 1.0, 1))
    second = (ShardingPlace("none", 0.0, 4), ShardingPlace("zero1", 3.0, 1), ShardingPlace("same", 0.0, 5))
    found = least_wait({"a": first, "b": second}, room_bytes=5)
    assert (found["a"].written, found["b"].written) == ("zero1", "none")
    assert least_wait({"a": first, "b": second}, room_bytes=9)["b"].written == "none"
    with pytest.raises(NoPlan, match="a and b need at least 2 B on a rank, got 1 B"):
        least_wait({"a": first, "b": second}, room_bytes=1)


@pytest.mark.parametrize("hidden_s", [0.0, 2.5, 10.0])
def test_what_is_waited_for_is_what_the_equation_says(hidden_s: float) -> None:
    there, back = [1.0, 2.0, 3.0], [0.5, 0.25]
    told = cost(play(tasks_of_gathers(hidden_s, there, back)))
    assert told.exposed_s == max(0.0, sum(there) - hidden_s) + sum(back)
