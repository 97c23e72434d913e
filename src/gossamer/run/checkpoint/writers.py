"""The division of replicated tensors over the ranks of a host that write them."""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import Tensor

from gossamer.run.staged_model import StagedModel


def balanced(shared: list[tuple[str, Tensor]], kept: Set[str], writer: int, writers: int) -> list[int]:
    """Return the indices of the tensors that `writer` writes, so that all write about as many bytes; the same on every
    rank.

    `kept`: buffers, which each replica computes from its own batches. The first writer writes all of them, because the
    mean of one replica and the variance of another do not belong together.
    """
    loads = [sum(tensor.nbytes for name, tensor in shared if name in kept), *[0] * (writers - 1)]
    mine = [i for i, (name, _) in enumerate(shared) if name in kept and not writer]
    largest_first = sorted(range(len(shared)), key=lambda i: (-shared[i][1].nbytes, i))
    for index in (i for i in largest_first if shared[i][0] not in kept):
        least = loads.index(min(loads))
        loads[least] += shared[index][1].nbytes
        if least == writer:
            mine.append(index)
    return sorted(mine)


def of_stage(
    cut: StagedModel, rank: int, shared: list[tuple[str, Tensor]], writer: int, writers: int
) -> tuple[list[tuple[str, Tensor]], int, int]:
    """Return the tensors that the writers with this rank's stages divide, this rank's index among them, and their
    count.

    A tensor of several stages belongs to the first of these stages that has a writer on this host.
    """
    first = rank - writer
    places = [cut.stages_at(other % cut.ranks) for other in range(first, first + writers)]
    mine = places[writer]
    leaders = {name: next(s for s in _stages_with(cut, bare(name)) if s in places) for name, _ in shared}
    alike = [i for i, place in enumerate(places) if place == mine]
    return [(n, t) for n, t in shared if leaders[n] == mine], alike.index(writer), len(alike)


def _stages_with(cut: StagedModel, name: str) -> Iterator[tuple[int, ...]]:
    """Yield the sets of stages that lie on the same ranks as each holder of a tensor."""
    return (cut.stages_at(group[0]) for group in cut.holders(name))


def bare(name: str) -> str:
    """Return the parameter name in "model/<name>" or "optim/<slot>/<name>"."""
    room, _, rest = name.partition("/")
    return rest.partition("/")[2] if room == "optim" else rest
