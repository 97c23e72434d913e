"""Holdings of all ranks together: every row is owned, counted and written once; one mean, one group; bytes add up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest

from gossamer import sharding as sharding_methods
from gossamer.comm.message import ProcessGroups
from gossamer.sharding import ElementBytes, Holding, bytes_of, holdings
from gossamer.spec.mesh import Groups, Mesh

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed": (64, 4),
    "few": (2, 3),
    "one": (1,),
    "scalar": (),
    "nothing": (0, 3),
    "odd": (17, 2),
}
WAYS: dict[str, Any] = {
    "none": "none",
    "zero1": "zero1",
    "zero1 island": {"zero1": {"shard_group": "island"}},
    "zero2": "zero2",
    "zero3": "zero3",
    "zero3 weights": {"zero3": {"weights_group": "island"}},
    "zero3 island": {"zero3": {"weights_group": "island", "states_group": "island"}},
}
each_way = pytest.mark.parametrize("written", WAYS.values(), ids=WAYS)


def meshes() -> Iterator[Mesh]:
    """One process, ranks alike, and islands of random sizes whose ranks are numbered in any order."""
    yield from (Mesh(), Mesh(2), Mesh(5), Mesh.of_islands([[0]]), Mesh.of_islands([[0], [1]]))
    for seed in range(12):
        draw = random.Random(seed)
        sizes = [draw.randrange(1, 4) for _ in range(draw.randrange(1, 4))]
        numbers = iter(draw.sample(range(sum(sizes)), sum(sizes)))
        yield Mesh.of_islands([[next(numbers) for _ in range(size)] for size in sizes])


each_mesh = pytest.mark.parametrize("mesh", list(meshes()), ids=str)


def rows(one: sharding_methods.RowRange) -> list[int]:
    return list(range(one.start, one.start + one.count))


def every(name: str) -> list[int]:
    return list(range(SHAPES[name][0] if SHAPES[name] else 1))


def of_all(mesh: Mesh, written: Any, **given: Any) -> dict[int, dict[str, Holding]]:
    """What every rank holds."""
    deal = sharding_methods.build(written).deal(ProcessGroups.of(mesh))
    return {rank: holdings(deal, SHAPES, rank, **given) for rank in mesh.everyone}


@each_mesh
@each_way
def test_all_who_say_they_have_the_same_rows_have_them_and_nobody_else(mesh: Mesh, written: Any) -> None:
    """Beside a reference that compares the rows of every two ranks."""
    world = of_all(mesh, written)
    for name, part in product(SHAPES, ("owned", "kept")):
        for rank, mine in world.items():
            here = getattr(mine[name], part)
            alike = {r for r, other in world.items() if getattr(other[name], part).rows == here.rows}
            assert set(here.ranks) == (alike if here.rows.count else set())
            assert rank in here.ranks or not here.rows.count
            assert all(getattr(world[r][name], part).ranks == here.ranks for r in here.ranks), "one speaks for all"


@each_mesh
@each_way
def test_every_row_is_counted_and_written_once(mesh: Mesh, written: Any) -> None:
    world = of_all(mesh, written)
    for name in SHAPES:
        mine = [world[rank][name] for rank in mesh.everyone]
        for held in ([one.owned for one in mine], [one.kept for one in mine]):
            first = [rows(one.rows) for rank, one in enumerate(held) if one.is_first(rank)]
            assert sorted(row for some in first for row in some) == every(name)
        # The norm is summed over the ranks that have the mean of their own rows, or over the first of each whole mean.
        speakers = [one for rank, one in enumerate(mine) if one.divided or rank == one.summed[0]]
        assert sorted(row for one in speakers if one.counts for row in rows(one.owned.rows)) == every(name)


@each_mesh
@each_way
def test_one_mean_has_one_group_and_states_lie_in_what_is_kept(mesh: Mesh, written: Any) -> None:
    world = of_all(mesh, written)
    for rank, mine in world.items():
        for name, one in mine.items():
            assert one.summed == mesh.group("replica", rank) and not one.added
            assert set(rows(one.owned.rows)) <= set(rows(one.kept.rows)) & set(rows(one.gradient))
            assert len(rows(one.gradient)) in (len(every(name)), one.owned.rows.count)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(1, ((0,), (1,), (2,))), Mesh(3, ((0,), (1,), (2,))), Mesh(1, ((3, 4), (0,), (1, 2, 5)))],
    ids=["pipe", "replicas", "uneven"],
)
def test_a_tied_weight_is_counted_by_one_stage_and_added_over_all(mesh: Mesh) -> None:
    """Of three stages the first and the last hold the embedding; what one stage holds alone is as ever."""
    tied: Groups = (mesh.stages[0], mesh.stages[2])
    levels = ProcessGroups.of(mesh)
    deal, world = sharding_methods.build("none").deal(levels), {}
    for rank in mesh.everyone:
        replica, place = mesh.place(rank)
        names = {f"of {number}" for number, stage in enumerate(mesh.stages) if place in stage}
        names |= {"embed"} if any(place in group for group in tied) else set()
        shapes = dict.fromkeys(names, (4, 2))
        world[rank] = holdings(deal, shapes, rank, added={"embed": mesh.of_replica(replica, tied)})
    counted, first = Counter[str](), Counter[str]()
    for rank, mine in world.items():
        for name, one in mine.items():
            assert one.summed == mesh.group("replica", rank)
            assert set(one.owned.ranks) == {r for r, other in world.items() if name in other}
            counted[name] += one.counts and rank == one.summed[0]
            first[name] += one.owned.is_first(rank)
            assert one.added == (mesh.of_replica(mesh.place(rank)[0], tied) if name == "embed" else ())
    assert counted == first == Counter({"embed": 1, "of 0": 1, "of 1": 1, "of 2": 1})


@each_mesh
@each_way
def test_bytes_are_those_of_the_rows(mesh: Mesh, written: Any) -> None:
    """2 bytes per kept element, 30 per element of the gradient, 500 per owned one; a frozen parameter is kept alone."""
    frozen, sizes = {"odd"}, dict.fromkeys(SHAPES, ElementBytes(kept=2, gradient=30, owned=500))
    for mine in of_all(mesh, written, frozen=frozen).values():
        wanted = 0
        for name, one in mine.items():
            row = SHAPES[name][1] if len(SHAPES[name]) > 1 else 1
            given = 0 if name in frozen else 30 * len(rows(one.gradient)) + 500 * one.owned.rows.count
            wanted += row * (2 * one.kept.rows.count + given)
        assert bytes_of(mine.values(), sizes) == wanted
    if mesh.size == 1:
        whole = of_all(mesh, written)[0].values()
        assert bytes_of(whole, sizes) == 532 * sum(one.numel(one.kept.rows) for one in whole)
