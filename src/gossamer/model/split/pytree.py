"""Flatten and rebuild the structures that modules pass around: torch's pytrees, and dataclasses too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A structure of containers and dataclasses without its leaves (tensors and Python values)."""

    tree: TreeSpec
    records: tuple[_Record | None, ...]  # per leaf of `tree`: the dataclass in its place, or None

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Return the structure with these leaves."""
        return self._fill(iter(leaves))

    def _fill(self, rest: Iterator[Any]) -> Any:
        return tree_unflatten([next(rest) if r is None else r.fill(rest) for r in self.records], self.tree)


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass that holds tensors."""

    kind: type
    names: tuple[str, ...]
    shape: TreeShape

    def fill(self, rest: Iterator[Any]) -> Any:
        made: Any = object.__new__(self.kind)  # its constructor might compute with a placeholder
        for name, held in zip(self.names, self.shape._fill(rest), strict=True):
            object.__setattr__(made, name, held)
        return made


def flatten(held: Any) -> tuple[list[Any], TreeShape]:
    """Return the leaves of lists, tuples, dicts, dataclasses and other types of torch's pytree, and their structure."""
    flat, tree = tree_flatten(held)
    leaves: list[Any] = []
    records: list[_Record | None] = []
    for leaf in flat:
        inner, record = _opened(leaf)
        leaves += inner
        records.append(record)
    return leaves, TreeShape(tree, tuple(records))


def leaves_of(held: Any) -> list[Any]:
    """Return the leaves of a structure."""
    return flatten(held)[0]


def _opened(leaf: Any) -> tuple[list[Any], _Record | None]:
    if isinstance(leaf, Tensor | type | nn.Module) or not is_dataclass(leaf):
        return [leaf], None
    names = tuple(field.name for field in fields(leaf) if hasattr(leaf, field.name))
    inner, shape = flatten(tuple(getattr(leaf, name) for name in names))
    if not any(isinstance(held, Tensor) for held in inner):
        return [leaf], None
    return inner, _Record(type(leaf), names, shape)
