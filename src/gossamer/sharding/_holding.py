"""Holdings: for every parameter and one rank the rows it keeps and owns, whose gradients are one mean, how many copies.

Gradient groups belong to parameters, not to ranks: a tied weight is added over the stages that hold it, a parameter of
few rows is owned by one rank. Replicated training is the case in which everybody owns all rows, one stage the case in
which no mean is added to another: neither is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from torch import Tensor

from gossamer.sharding._row_partition import RowPartition, RowRange
from gossamer.spec.mesh import Group, Groups

Shape = tuple[int, ...]
NOT_TIED: Mapping[str, Groups] = MappingProxyType({})  # no parameter is held by several stages
_NONE = RowRange(0, 0)


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows of a parameter and the ranks that have just these, the one that speaks for all of them first."""

    rows: RowRange
    ranks: Group

    def is_first(self, rank: int) -> bool:
        """Return whether `rank` speaks for the rows, as it counts and writes them: no rank before it has them."""
        return self.ranks[:1] in ((), (rank,))


@dataclass(frozen=True, slots=True)
class Holding:
    """One parameter as one rank of a run holds it.

    `kept`: the rows of the parameter that stay on the rank between steps. `owned`: those whose optimizer state and
    update are its own; none of a frozen parameter. `gradient`: the rows of the mean gradient that it keeps. `summed`:
    the ranks whose gradients of it are one mean; of this mean the rank has its owned rows where it is `divided`, else
    all. `added`: by stage the ranks of this replica that hold it, whose means are added; () where all who hold it have
    one mean. `counts`: whether the norm of the gradients has the owned rows from this rank, or if it is not divided
    from the first that has the same mean.
    """

    name: str
    shape: Shape
    kept: RowShard
    owned: RowShard
    gradient: RowRange
    summed: Group
    divided: bool
    added: Groups = ()
    counts: bool = True

    def own(self, tensor: Tensor) -> Tensor:
        """Return the owned rows of a tensor shaped like the parameter; an empty tensor where there are none."""
        rows = self.owned.rows
        return rows.of(tensor) if rows.count else tensor.new_empty(0)

    def numel(self, rows: RowRange) -> int:
        """Return the number of elements in some rows of the parameter."""
        return rows.count * prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """The bytes per element of a parameter: of its kept rows, of their gradient, and of the state of its owned rows.

    `owned_row`: further bytes per owned row, however long it is.
    """

    kept: int
    gradient: int
    owned: int
    owned_row: int = 0


def holdings(
    deal: RowPartition,
    shapes: Mapping[str, Shape],
    rank: int,
    *,
    added: Mapping[str, Groups] = NOT_TIED,
    frozen: Collection[str] = (),
) -> dict[str, Holding]:
    """Return what `rank` holds of every parameter in `shapes`, those of its stages, where rows are dealt by `deal`.

    `added`: tied parameters of several stages, with the ranks of each that hold them in this replica. `frozen`: the
    parameters that are not trained.
    """
    levels, divided = deal.levels, bool(deal.path)
    home = levels.group("all", rank)
    owners, keepers = deal.copies(rank), deal.of_parameters.copies(rank)
    found = {}
    for name, shape in shapes.items():
        groups = added.get(name, ())
        everywhere = tuple(r for group in groups for r in levels.group("all", group[0]))
        kept = _shard(deal.of_parameters.rows(name, shape, rank), everywhere or keepers)
        owned = _shard(_NONE if name in frozen else deal.rows(name, shape, rank), everywhere or owners)
        found[name] = Holding(
            name=name,
            shape=shape,
            kept=kept,
            owned=owned,
            gradient=owned.rows if deal.gives_back or name in frozen else all_rows(shape),
            summed=home,
            divided=divided,
            added=groups,
            counts=any(owned.is_first(one) for one in ((rank,) if divided else home)),
        )
    return found


def bytes_of(held: Iterable[Holding], sizes: Mapping[str, ElementBytes]) -> int:
    """Return the bytes of the parameters, gradients and states that a rank holds; `sizes` by parameter name."""
    return sum(
        one.numel(one.kept.rows) * sizes[one.name].kept
        + one.numel(one.gradient) * sizes[one.name].gradient
        + one.numel(one.owned.rows) * sizes[one.name].owned
        + one.owned.rows.count * sizes[one.name].owned_row
        for one in held
    )


def all_rows(shape: Shape) -> RowRange:
    """Return all rows of a parameter; a 0-dim one is one row."""
    return RowRange(0, shape[0] if shape else 1)


def shapes_of(params: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes of parameters by name."""
    return {name: tuple(param.shape) for name, param in params.items()}


def _shard(rows: RowRange, ranks: Group) -> RowShard:
    """Return rows with those who have them: nobody where there are none."""
    return RowShard(rows, ranks if rows.count else ())
