"""Mesh: groups of ranks along named axes, beside a reference that asks every pair of ranks if they belong together."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from gossamer.spec.errors import BadInput
from gossamer.spec.mesh import Axis, Groups, Mesh
from gossamer.spec.plan import MeshSizes, Plan


def dealt(draw: random.Random, count: int) -> Groups:
    """The numbers below `count` in groups of any sizes, none of them empty, in any order."""
    numbers = draw.sample(range(count), count)
    cuts = sorted(draw.sample(range(1, count), draw.randrange(count))) if count > 1 else []
    return tuple(tuple(numbers[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True))


def meshes() -> Iterator[Mesh]:
    """Meshes of random sizes: with replicas, stages of any number of ranks, islands, and none of them."""
    for seed in range(60):
        draw = random.Random(seed)
        yield Mesh(draw.randrange(1, 6), dealt(draw, draw.randrange(1, 6)))
        ranks = draw.randrange(1, 9)
        yield Mesh(ranks, islands=dealt(draw, ranks))


def joined(mesh: Mesh, alike: Callable[[int, int], bool]) -> set[tuple[int, ...]]:
    """The groups of ranks that are `alike` in pairs, each ascending."""
    ranks = range(mesh.replicas * sum(len(stage) for stage in mesh.stages))
    return {tuple(other for other in ranks if alike(rank, other)) for rank in ranks}


def stage_of(mesh: Mesh, rank: int) -> int:
    width = sum(len(stage) for stage in mesh.stages)
    return next(number for number, stage in enumerate(mesh.stages) if rank % width in stage)


def seat_of(mesh: Mesh, rank: int) -> tuple[int, int]:
    """(island, how many of it have a lower number)"""
    island = next(number for number, ranks in enumerate(mesh.islands) if rank in ranks)
    return island, sum(other < rank for other in mesh.islands[island])


@pytest.mark.parametrize("mesh", list(meshes()), ids=str)
def test_groups_are_those_that_pairs_of_ranks_form(mesh: Mesh) -> None:
    width = sum(len(stage) for stage in mesh.stages)
    assert set(mesh.groups("replica")) == joined(mesh, lambda a, b: stage_of(mesh, a) == stage_of(mesh, b))
    assert set(mesh.groups("pipe")) == joined(mesh, lambda a, b: a // width == b // width)
    if not mesh.islands:
        return
    smallest = min(len(island) for island in mesh.islands)

    def are_counterparts(a: int, b: int) -> bool:
        (_, here), (_, there) = seat_of(mesh, a), seat_of(mesh, b)
        return a == b or here == there < smallest

    assert set(mesh.groups("island")) == joined(mesh, lambda a, b: seat_of(mesh, a)[0] == seat_of(mesh, b)[0])
    assert set(mesh.groups("between")) == joined(mesh, are_counterparts)


@pytest.mark.parametrize("mesh", list(meshes()), ids=str)
def test_groups_of_an_axis_are_a_partition_of_the_ranks(mesh: Mesh) -> None:
    for axis in mesh.axes:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(mesh.everyone)
        assert all(list(group) == sorted(group) for group in groups)
        assert all(rank in mesh.group(axis, rank) and mesh.group(axis, rank) in groups for rank in mesh.everyone)


@pytest.mark.parametrize("mesh", list(meshes()), ids=str)
def test_places_number_the_ranks_and_give_them_back(mesh: Mesh) -> None:
    assert [mesh.rank(*mesh.place(rank)) for rank in mesh.everyone] == list(mesh.everyone)
    assert {mesh.place(rank) for rank in mesh.everyone} == {
        (replica, place) for replica in range(mesh.replicas) for place in range(mesh.width)
    }
    for replica in range(mesh.replicas):
        assert sorted(r for group in mesh.of_replica(replica, mesh.stages) for r in group) == list(
            mesh.group("pipe", mesh.rank(replica, 0))
        )


@pytest.mark.parametrize("mesh", list(meshes()), ids=str)
def test_pairs_over_a_boundary_are_neighboring_stages_of_one_replica(mesh: Mesh) -> None:
    for stage in range(len(mesh.stages) - 1):
        wanted = {
            (a, b)
            for a in mesh.everyone
            for b in mesh.everyone
            if (stage_of(mesh, a), stage_of(mesh, b)) == (stage, stage + 1) and mesh.place(a)[0] == mesh.place(b)[0]
        }
        found = list(mesh.pairs(stage))
        assert set(found) == wanted and len(found) == len(wanted)


@pytest.mark.parametrize("mesh", list(meshes()), ids=str)
def test_levels_are_the_groups_in_the_order_of_their_creation(mesh: Mesh) -> None:
    """Where all ranks hold all of the model there is one level without islands, as for one process."""
    levels = mesh.levels()
    if len(mesh.stages) > 1:
        assert list(levels) == ["all", "pipe", "world"]
        assert levels["pipe"] == mesh.groups("pipe") and levels["world"] == (mesh.everyone,)
    else:
        assert list(levels) == (["all", "island", "between"] if mesh.islands else ["all"])
        assert levels["all"] == (mesh.everyone,)
    assert levels["all"] == mesh.groups("replica")
    assert mesh.in_stages == (len(mesh.stages) > 1)
    assert mesh.is_replicated == (len(mesh.stages) < mesh.size)


def test_one_process_is_a_mesh_of_one_stage() -> None:
    alone = Mesh()
    assert (alone.size, alone.place(0), alone.group("replica", 0), alone.group("pipe", 0)) == (1, (0, 0), (0,), (0,))
    assert alone.levels() == {"all": ((0,),)}
    assert not alone.in_stages and not alone.is_replicated


@pytest.mark.parametrize("axis", ["island", "between"])
def test_an_axis_that_is_not_there_is_answered_with_those_that_are(axis: Axis) -> None:
    with pytest.raises(BadInput, match=rf"no mesh axis '{axis}', the axes are replica, pipe:"):
        Mesh(4).group(axis, 0)
    with pytest.raises(
        BadInput, match=rf"rank 4 .*'{axis}', the ranks are 0 to 3 .*axes replica, pipe, island, between:"
    ):
        Mesh.of_islands([[0, 1], [2, 3]]).group(axis, 4)


def test_a_plan_says_its_mesh_by_sizes_or_by_the_ranks_of_stages() -> None:
    sizes = Plan(
        mesh=MeshSizes(replica=2, pipe=3), batch_fractions=(0.5, 0.5), rows=(4, 4), microbatches=(2, 2), islands=()
    )
    assert sizes.axes.groups("replica") == ((0, 3), (1, 4), (2, 5))
    assert sizes.axes.groups("pipe") == ((0, 1, 2), (3, 4, 5))
    uneven = Plan(
        mesh=MeshSizes(pipe=2),
        stage_ranks=((2,), (0, 1)),
        batch_fractions=(0.5, 0.5, 1.0),
        rows=(4,),
        microbatches=(2,),
    )
    assert uneven.axes.groups("replica") == ((2,), (0, 1))
    assert (uneven.ranks, list(uneven.axes.pairs(0))) == (3, [(2, 0), (2, 1)])
