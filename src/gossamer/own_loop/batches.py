"""Splitting batches of any structure over ranks: which tensors have rows, in which dimension, and which rows are this
rank's.

Tuples, lists, named tuples, dataclasses, dictionaries of any class, nested: each keeps its type, with this rank's rows
in place of all. Strings, numbers and None are copied to every rank; a list with one item per row is split. Rows are
found only where there is no ambiguity: every tensor has the same size in its first dimension. An ambiguous tensor or
list must be named by the user (`rows=`); nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gossamer.data import share_rows
from gossamer.own_loop.batch_fingerprint import fingerprint
from gossamer.own_loop.batch_structure import PLAIN, leaves, nodes, take_rows
from gossamer.spec.errors import BadInput, bad_input

Take: TypeAlias = Callable[[int], slice]
BatchDims: TypeAlias = "int | Mapping[str, int | None] | Callable[[Any, Take], Any] | None"

_FIELDS = 3  # a batch that is a list of up to 3 tensors is (inputs, targets), not rows


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one batch that this rank trains on. `rows`: how many of the `whole` rows are its own; 0 if there were
    fewer rows than ranks, and then the batch holds one row of weight 0. `mark`: 32-bit hash of the global batch, to
    check that ranks agree.
    """

    batch: Any
    rows: int
    whole: int
    mark: int
    dims: Mapping[str, int] | None = None  # row dimension by path; None if a function took the rows
    first: int = 0  # row dimension, if equal in all tensors of two or more

    def having_rows(self) -> list[tuple[Tensor, int]]:
        """Return the tensors that have rows, each with the dimension that has them."""
        if self.dims is None:
            return []
        return [
            (one, self.dims[path]) for path, one in leaves(self.batch) if path in self.dims and isinstance(one, Tensor)
        ]

    def counts(self) -> set[float]:
        """Return the values that a loss may divide by: rows, elements, and labels that are not ignored or not padding,
        before and after the shift of causal models.
        """
        found: set[float] = {float(self.rows)}
        for _, leaf in leaves(self.batch):
            if not isinstance(leaf, Tensor):
                continue
            found |= {float(leaf.shape[0]) if leaf.dim() else 1.0, float(leaf.numel())}
            found |= {float(leaf[..., 1:].numel())} if leaf.dim() > 1 else set()
            if not leaf.is_floating_point() and not leaf.is_complex():
                for one in (leaf, leaf[..., 1:]) if leaf.dim() > 1 else (leaf,):
                    found |= {float(torch.count_nonzero(one)), float((one != -100).sum()), float((one > 0).sum())}
            else:
                found.add(float(leaf.detach().real.sum()) if leaf.dim() else 1.0)
        return found

    def lacks(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, a view of this batch, omits its first or last rows."""
        for _, leaf in leaves(self.batch):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == max(1, self.rows) and leaf.numel():
                if not _overlap(tensor, leaf):
                    continue
                low = tensor.storage_offset() - leaf.storage_offset()
                high = low + _reach(tensor)
                row = leaf.stride(0)
                return low >= row or high < (leaf.shape[0] - 1) * row
        return False

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` shares memory with this batch."""
        return any(_overlap(tensor, leaf) for _, leaf in leaves(self.batch) if isinstance(leaf, Tensor))


@dataclass(frozen=True, slots=True)
class Divider:
    """The splitter of batches over ranks.

    `rows`: None finds the row dimension; a number is that of all tensors; a mapping names it by path ("w", "0",
    "x.mask"), None for a tensor that every rank keeps; a function splits a batch of an unknown structure. `given_rows`:
    the loader's batch size, if known. `may_be_time_major`: whether the model may take rows in the second dimension.
    """

    rank: int
    parts: tuple[float, ...]
    rows: BatchDims = None
    given_rows: int | None = None
    may_be_time_major: bool = False
    _whole_lists: set[str] = field(default_factory=set, compare=False)  # lists found shorter or longer than their batch

    def share(self, batch: Any, *, is_last: bool = True) -> Share:
        """Return this rank's part of a batch. Raises BadInput if the tensors with rows are ambiguous."""
        mark = fingerprint(batch)
        if callable(self.rows):
            taken: list[tuple[int, int]] = []
            mine = self.rows(batch, lambda whole: self._taking(whole, taken))
            if not taken:
                raise BadInput(
                    "wanted a function rows(batch, take) that calls take(number of rows), got one that did not: call "
                    "take, and index the batch with the slice that it returns",
                    key="rows",
                )
            return Share(mine, *taken[-1], mark)
        dims = self._dims(batch)
        sizes = {path: size for path, (_, size) in dims.items()}
        whole = self._whole(sizes, is_last)
        start, stop = self.bounds(whole)
        listed = self._lists_of_rows(batch, dims, whole)
        mine = take_rows(batch, dims, listed, slice(start, max(stop, start + 1)) if stop > start else slice(0, 1))
        return Share(
            mine, stop - start, whole, mark, {path: dim for path, (dim, _) in dims.items()}, _first(mine, dims)
        )

    def _taking(self, whole: int, taken: list[tuple[int, int]]) -> slice:
        start, stop = self.bounds(whole)
        taken.append((stop - start, whole))
        return slice(start, stop) if stop > start else slice(0, 1)

    def rows_of(self, batch: Any, rows: slice) -> Any:
        """Return the `rows` of a batch whose tensors all have rows in the first dimension."""
        dims = {path: (0, leaf.shape[0]) for path, leaf in leaves(batch)}
        return take_rows(batch, dims, set(), rows)

    def bounds(self, whole: int) -> tuple[int, int]:
        """Return the half-open range (start, stop) of this rank's rows among `whole`."""
        if whole >= len(self.parts):
            rows = share_rows(whole, self.parts)
        else:  # the first ranks have one each
            rows = tuple(int(rank < whole) for rank in range(len(self.parts)))
        start = sum(rows[: self.rank])
        return start, start + rows[self.rank]

    def _dims(self, batch: Any) -> dict[str, tuple[int, int]]:
        """Return (dimension, rows) of each tensor that has rows, by path."""
        found: dict[str, tuple[int, int]] = {}
        named = self.rows if isinstance(self.rows, Mapping) else {}
        tensors = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim}
        lists = {path for path, one in nodes(batch) if type(one) in (list, tuple)}
        for path in named:
            if path not in tensors and path not in lists:
                raise bad_input(
                    wanted=f"a tensor or list called {path!r} in the batch",
                    got=", ".join(repr(one) for one in sorted((*tensors, *lists)) if one) or "none",
                    do="use a name from the batch as a key of rows=",
                    key="rows",
                )
        self._check_time_major(tensors)
        for path, leaf in tensors.items():
            if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
                continue  # refused below
            dim = named[path] if path in named else (self.rows if isinstance(self.rows, int) else 0)
            if dim is not None:
                found[path] = (dim, leaf.shape[dim])
        for path, leaf in leaves(batch):
            is_known = isinstance(leaf, (Tensor, np.ndarray, list, tuple, *PLAIN))
            if is_known and not (isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested)):
                continue
            raise bad_input(
                wanted="batches of tensors (in tuples, lists, dictionaries, dataclasses)",
                got=f"{_form(leaf)} at {path or 'the top'}",
                do="pass rows=, a function of (batch, take) that indexes a batch of n rows with the slice take(n), or "
                "split=False if every rank's loader yields its own data",
            )
        if not found:
            raise bad_input(
                wanted="a batch whose rows can be split over ranks",
                got=f"{type(batch).__name__} without a tensor of one dimension or more",
                do="pass split=False if every rank's loader yields its own data",
            )
        return found

    def _lists_of_rows(self, batch: Any, dims: Mapping[str, tuple[int, int]], whole: int) -> set[str]:
        """Return the paths of the lists and tuples that have one item per row."""
        found: set[str] = set()
        named = self.rows if isinstance(self.rows, Mapping) else {}
        for path, one in nodes(batch):
            if type(one) not in (list, tuple):
                continue
            if path in named:
                found |= {path} if named[path] is not None else set()
            elif len(one) != whole:
                self._whole_lists.add(path)
            elif path not in self._whole_lists and self._is_of_rows(path, one, dims, whole):
                found.add(path)
        return found

    def _is_of_rows(self, path: str, one: Sequence[Any], dims: Mapping[str, tuple[int, int]], whole: int) -> bool:
        """Return whether a list as long as the batch has one item per row. Raises BadInput if that is ambiguous."""
        inner = [own for own in dims if own.startswith(f"{path}." if path else "") and own != path]
        is_told = isinstance(self.rows, int) or (
            isinstance(self.rows, Mapping) and all(own in self.rows for own in inner)
        )
        if whole < 2:
            return False  # a single row: nothing to split
        if not inner:
            if not path:
                return False
            is_size = isinstance(one, tuple) and all(isinstance(each, (int, float)) for each in one)
            if not is_size:
                return True  # strings, numbers or records, one per row
        elif is_told or not _is_of_one_kind(one) or (not path and len(one) <= _FIELDS):
            return False  # fields, each with its own rows
        raise bad_input(
            wanted="rows= for a list as long as the batch: one item per row, or the same list for all rows",
            got=f"{type(one).__name__} of {whole} {f'tensors of {whole} rows each' if inner else 'numbers'} at "
            f"{path or 'the top'}, in a batch of {whole} rows",
            do=_how_to_tell(path, inner),
            key="rows",
        )

    def _check_time_major(self, tensors: Mapping[str, Any]) -> None:
        if not self.may_be_time_major or self.rows is not None or not tensors:
            return
        if all(leaf.ndim >= 2 for leaf in tensors.values()) and len({leaf.shape[1] for leaf in tensors.values()}) == 1:
            raise bad_input(
                wanted="rows=, the batch dimension of the inputs, as the model has layers with batch_first=False",
                got=", ".join(f"{path or 'tensor'} of shape {tuple(leaf.shape)}" for path, leaf in tensors.items()),
                do="pass rows=1 if the second dimension is the batch dimension, rows=0 if the first is",
                key="rows",
            )

    def _whole(self, sizes: Mapping[str, int], is_last: bool) -> int:
        """Return the number of rows of the batch. Raises BadInput if tensors disagree, or differ from the loader."""
        several = set(sizes.values())
        wanted = self.given_rows
        if len(several) > 1 or (wanted is not None and several and not self._is_usual(min(several), wanted, is_last)):
            usual = wanted if wanted is not None else max(several, key=list(sizes.values()).count)
            odd = next((path for path, size in sizes.items() if size != usual), "")
            listed = ", ".join(f"{path or 'tensor'}: {size}" for path, size in sizes.items())
            raise bad_input(
                wanted="the same number of rows (size of dimension 0) in every tensor of a batch"
                + (f": {wanted}, the loader's batch size" if wanted is not None else ""),
                got=listed,
                do=f'pass rows={{"{odd}": None}} if {odd or "the tensor"} is the same for all rows, or '
                f'rows={{"{odd}": d}} if its rows are in dimension d',
                key="rows",
            )
        return several.pop()

    def _is_usual(self, rows: int, wanted: int, is_last: bool) -> bool:
        return rows == wanted or (is_last and rows < wanted) or self.rows is not None


def _is_of_one_kind(one: Sequence[Any]) -> bool:
    """Return whether all items are tensors of one shape and dtype, as rows are."""
    return all(isinstance(each, Tensor) for each in one) and len({(each.shape, each.dtype) for each in one}) == 1


def _how_to_tell(path: str, inner: Sequence[str]) -> str:
    if not inner:
        return f'pass rows={{"{path}": 0}} for one item per row, or rows={{"{path}": None}} for the same for all rows'
    fields = ", ".join(f'"{own}": 0' for own in inner)
    return f"pass rows={{{fields}}} if each tensor has rows, or rows=, a function (batch, take) that indexes the list"


def _form(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return "a nested tensor" if leaf.is_nested else f"a tensor of {leaf.layout}"


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors overlap in memory, from the first to the last element of each."""
    if one.layout != torch.strided or other.layout != torch.strided or not one.numel() or not other.numel():
        return False
    starts = [t.data_ptr() for t in (one, other)]
    ends = [t.data_ptr() + _reach(t) * t.element_size() for t in (one, other)]
    return starts[0] <= ends[1] and starts[1] <= ends[0]


def _reach(tensor: Tensor) -> int:
    """Return the distance from the first element to the last, in elements."""
    return int(sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def _first(batch: Any, dims: Mapping[str, tuple[int, int]]) -> int:
    found = {dims[path][0] for path, one in leaves(batch) if path in dims and one.ndim > 1}
    return found.pop() if len(found) == 1 else 0


def is_time_major(modules: Sequence[torch.nn.Module]) -> bool:
    """Return whether any layer takes inputs of shape (time, rows, ...), as batch_first=False says."""
    return any(getattr(layer, "batch_first", True) is False for one in modules for layer in one.modules())
