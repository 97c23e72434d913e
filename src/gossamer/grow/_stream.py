"""The residual stream of both models, and the norm in front of a tied head, which takes the head's factor.

A tied head reads the n copies of the stream with the embedding, whose columns are all written alike, and so gives n
times the logits. Its norm is scaled by 1/n instead; other readers of that norm are scaled by n.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.grow import GrowthTask
from gossamer.model.structure.model import STREAM, ModelStructure
from gossamer.spec.errors import BadInput, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The residual stream. before, after: its sizes; kinds: of the norms over it; tied: weights of norms before a tied
    head, biases included; tied_reads: parameters that read such a norm.
    """

    before: int
    after: int
    kinds: frozenset[str]
    tied: frozenset[str]
    tied_reads: frozenset[str]

    @staticmethod
    def of(task: GrowthTask) -> Stream:
        """Return the stream of a task; raise BadInput for a model with streams of several sizes."""
        before, after = (_size(one) for one in (task.source, task.target))
        target = task.target
        norms = [one for one in target.norms if _is_stream(target, one.dim)]
        shared = target.shared()
        tied = [one for name in shared for one in target.reads.get(name, ()) if one is not None]
        for name in sorted(shared):
            if None in target.reads.get(name, ()) and before != after:
                raise bad_input(
                    wanted=f"a norm in front of what reads {name}, as it is tied",
                    got="another operator",
                    do="untie the head, or keep the width of the residual stream",
                    key="--to",
                )
        return Stream(
            before=before,
            after=after,
            kinds=frozenset(one.kind for one in norms),
            tied=frozenset(name for one in tied for name in (one.weight, one.bias) if name),
            tied_reads=frozenset(
                name for name, reads in target.reads.items() if any(one in tied for one in reads if one is not None)
            ),
        )


def _size(structure: ModelStructure) -> int:
    sizes = {
        leaf.size
        for dims in structure.dims.values()
        for dim in dims
        for leaf in dim.leaves()
        if structure.role(leaf) == STREAM
    }
    if len(sizes) != 1:
        raise bad_input(
            wanted="one size of the residual stream in all blocks",
            got=", ".join(map(str, sorted(sizes))) or "no parameter on it",
            do="name a model whose blocks hand on tensors of one width",
            key="--to",
        )
    return sizes.pop()


def _is_stream(structure: ModelStructure, dim: object) -> bool:
    return any(structure.role(leaf) == STREAM for leaf in dim.leaves())  # type: ignore[attr-defined]


def indivisible(method: str, role: str, name: str, small: int, large: int) -> BadInput:
    """Return the error about a size that is no multiple of the other model's, with the nearest legal ones."""
    low = max(1, large // small) * small
    legal = " or ".join(str(one) for one in dict.fromkeys((low, low + small)))
    return bad_input(
        wanted=f"a number of {role} in the larger model that is a multiple of the smaller one's {small} ({method})",
        got=f"{large} ({name})",
        do=f"set it to {legal}, or take lemon, which grows to any size",
        key="--to",
    )
