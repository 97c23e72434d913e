"""Structure of a batch: its leaves by path, and the same structure with some rows of each.

Tuples, lists, named tuples, dataclasses, dictionaries of any class, nested: each keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of a batch. A list without tensors or containers is one leaf: it is split by
    rows.
    """
    children = _children(batch)
    if children is None:
        yield path, batch
    else:
        for name, child in children:
            yield from leaves(child, f"{path}.{name}" if path else str(name))


def nodes(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, node) for every container and leaf of a batch, itself included."""
    yield path, batch
    for name, child in _children(batch) or []:
        yield from nodes(child, f"{path}.{name}" if path else name)


def _children(batch: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a container; None for a leaf."""
    if isinstance(batch, Mapping):
        return [(str(name), child) for name, child in batch.items()]
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        return None
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(zip(batch._fields, batch, strict=True))
    if isinstance(batch, list | tuple):
        if all(isinstance(one, PLAIN) for one in batch):
            return None
        return [(str(index), child) for index, child in enumerate(batch)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(one.name, getattr(batch, one.name)) for one in dataclasses.fields(batch)]
    return None


def take_rows(batch: Any, dims: Mapping[str, tuple[int, int]], lists: set[str], rows: slice, path: str = "") -> Any:
    """Return `batch` with `rows` of every tensor that has them.

    `dims`: dimension and number of rows by path. `lists`: paths of lists that have one item per row.
    """
    if path in lists:
        return batch[rows]
    children = _children(batch)
    if children is None:
        return batch[(slice(None),) * dims[path][0] + (rows,)] if path in dims else batch
    taken = {name: take_rows(child, dims, lists, rows, f"{path}.{name}" if path else name) for name, child in children}
    return _rebuilt(batch, taken)


def _rebuilt(batch: Any, taken: Mapping[str, Any]) -> Any:
    if isinstance(batch, Mapping):
        named = {name: taken[str(name)] for name in batch}
        if type(batch) is dict:
            return named
        again = copy.copy(batch)
        for name, child in named.items():
            again[name] = child  # type: ignore[index]
        return again
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*taken.values())
    if isinstance(batch, list | tuple):
        return type(batch)(taken.values())
    again = copy.copy(batch)
    for name, child in taken.items():
        object.__setattr__(again, name, child)
    return again
