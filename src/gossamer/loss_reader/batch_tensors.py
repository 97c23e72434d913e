"""The row dimensions of tensors that a loop made from a batch: found by memory and values, else by sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.loss_reader.row_dims import PART, ROWS, RowDims, RowsLost, RowsMixed, plain, refolded, with_rows
from gossamer.loss_reader.row_flow import RowOrigin

_COUNTED = 1 << 20  # elements inspected of a tensor, at most
_SHOWN = 64  # elements of each row looked up in the batch, about


@dataclass(frozen=True, slots=True)
class OfBatch(RowOrigin):
    """The batch of one backward pass, which tells where tensors without an autograd graph have rows.

    `leaves`: the tensors of the batch, each with its row dimension. `first`: the row dimension of a tensor unlike any
    of them. `owned`: start addresses of the models' own tensors, which have no rows. `folds`: whether a first dimension
    whose size is a multiple of the rows has rows.
    """

    rows: int
    leaves: tuple[tuple[Tensor, int], ...] = ()
    first: int = 0
    owned: frozenset[int] = frozenset()
    folds: bool = True

    def layout(self, tensor: Tensor, *, is_input: bool) -> RowDims | None:
        """Return the row dimensions of a tensor without a graph; None if it has no rows.

        `is_input`: whether it is a layer's input, which is taken to have rows, however many.
        """
        if not tensor.dim() or not tensor.numel() or tensor.layout != torch.strided:
            return None
        if tensor.untyped_storage().data_ptr() in self.owned:
            return None
        if (found := self._of_leaf(tensor)) is not None:
            return found
        if _is_count(tensor) or _is_constant(tensor):
            return None
        if is_input and (found := self._of_copy(tensor)) is not None:
            return found
        if (found := self._of_numbers(tensor)) is not None:
            return found
        if (dim := self._like(tensor.shape)) is not None:
            return with_rows(tensor.shape, dim)
        order = _outer_first(tensor)
        if is_input and tensor.is_floating_point() and tensor.dim() > 1:
            order.remove(tensor.dim() - 1)  # a layer's features
        return self._of_sizes(tensor.shape, order, is_input=is_input)

    def layout_of_size(self, sizes: Sequence[int]) -> RowDims | None:
        """Return the row dimensions of a tensor of which only the sizes are known; None if it has no rows."""
        return self._of_sizes(sizes, list(range(len(sizes))), is_input=self.folds) if sizes else None

    def _of_leaf(self, tensor: Tensor) -> RowDims | None:
        """Return the layout of a view of a tensor of the batch; None if it is no such view."""
        start = tensor.untyped_storage().data_ptr()
        for leaf, dim in self.leaves:
            if leaf.untyped_storage().data_ptr() != start:
                continue
            if tensor.shape == leaf.shape and tensor.stride() == leaf.stride():
                return with_rows(tensor.shape, dim)
            if tensor.numel() == leaf.numel() and tensor.is_contiguous() and leaf.is_contiguous():
                return _refolded(with_rows(leaf.shape, dim), tensor.shape, self.rows)
            alike = [
                at
                for at in range(tensor.dim())
                if tensor.stride(at) == leaf.stride(dim) and tensor.shape[at] == leaf.shape[dim]
            ]
            if alike:
                return with_rows(tensor.shape, alike[0])
        return None

    def _of_copy(self, tensor: Tensor) -> RowDims | None:
        """Return the layout of a copy of a tensor of the batch, as it is or with its first two dimensions transposed,
        and folded.
        """
        for leaf, dim in self.leaves:
            if leaf.numel() != tensor.numel() or dim > 1 or leaf.dim() < (2 if _is_square(leaf) else 3):
                continue
            if leaf.shape == tensor.shape and not _is_square(leaf):
                continue
            flat = tensor.reshape(-1)
            for one, place in ((leaf, dim), (leaf.transpose(0, 1), 1 - dim)):
                if bool((one.reshape(-1).to(flat) == flat).all()):
                    return _refolded(with_rows(one.shape, place), tensor.shape, self.rows)
        return None

    def _of_numbers(self, tensor: Tensor) -> RowDims | None:
        """Return the layout of a tensor assembled from the batch's own values (rows after rows, steps before rows,
        image windows).

        Each row's values are looked up among that row's values in the batch. None if no place fits, or several do.
        """
        if self.rows < 2 or tensor.numel() > _COUNTED:
            return None
        own = self._numbers(tensor)
        fits = [place for place in self._folds(tensor.shape) if own and self._is_of(tensor, place, own)]
        if len(fits) != 1:
            return None
        at, many, each = fits[0]
        dim = tuple(one for one in ((many, ""), (self.rows, ROWS), (each, "")) if one[0] > 1)
        return (*plain(tensor.shape[:at]), dim, *plain(tensor.shape[at + 1 :]))

    def _numbers(self, tensor: Tensor) -> list[Tensor]:
        """Return the values that each row has in the batch, of the tensor's kind (floating-point or not)."""
        wide = [
            leaf.detach().movedim(dim, 0).reshape(self.rows, -1).to("cpu", tensor.dtype)
            for leaf, dim in self.leaves
            if leaf.is_floating_point() == tensor.is_floating_point() and leaf.numel() <= _COUNTED
        ]
        return list(torch.cat(wide, 1)) if wide else []

    def _folds(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (dimension, repeats of all rows, repeats of each row) for every dimension that may have rows."""
        for at, size in enumerate(sizes):
            whole = size // self.rows if size % self.rows == 0 else 0
            yield from ((at, whole // each, each) for each in range(1, whole + 1) if whole % each == 0)

    def _is_of(self, tensor: Tensor, place: tuple[int, int, int], own: Sequence[Tensor]) -> bool:
        at, many, each = place
        rows = tensor.detach().movedim(at, 0).reshape(many, self.rows, each, -1).movedim(1, 0).reshape(self.rows, -1)
        shown = rows[:, :: max(1, rows.shape[1] // _SHOWN)].cpu()
        if len(set(shown.flatten().tolist())) < 3:
            return False  # masks have too few values to tell
        return all(bool(torch.isin(one, known).all()) for one, known in zip(shown, own, strict=True))

    def _like(self, sizes: Sequence[int]) -> int | None:
        """Return the row dimension of a batch tensor of these sizes; None if there is none."""
        return next((dim for leaf, dim in self.leaves if leaf.shape == tuple(sizes)), None)

    def _of_sizes(self, sizes: Sequence[int], order: Sequence[int], *, is_input: bool) -> RowDims | None:
        """Return the layout that the sizes suggest. `order`: the dimensions, the slowest-varying first."""
        at = order[self.first] if self.first < len(order) else order[0]
        if sizes[at] == self.rows:
            return with_rows(sizes, at)
        if self.rows > 1 and (same := [dim for dim in order if sizes[dim] == self.rows]):
            return with_rows(sizes, same[0])
        outer = order[0]
        if not is_input:
            return None
        found = with_rows(sizes, outer)
        if self.rows == 1 and self.folds:
            both = ((1, ROWS), (sizes[outer], ""))
            return (*found[:outer], both[::-1] if self.first else both, *found[outer + 1 :])
        return with_rows(sizes, outer, f"{PART}{sizes[outer]}")


def _is_square(tensor: Tensor) -> bool:
    """Return whether the first two dimensions are equal."""
    return tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]


def _refolded(layout: RowDims, sizes: Sequence[int], rows: int) -> RowDims | None:
    try:
        return refolded(layout, sizes, rows, "a view")
    except (RowsMixed, RowsLost):
        return None  # it was made from the batch by unknown operations


def _outer_first(tensor: Tensor) -> list[int]:
    """Return the dimensions in memory order, expanded ones last."""
    strides: tuple[int, ...] = tuple(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda at: (strides[at] == 0, -strides[at]))


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal, as in an initial hidden state."""
    first = tensor[(0,) * tensor.dim()]
    return tensor.numel() > 1 and tensor.numel() <= _COUNTED and bool((tensor == first).all())


def _is_count(tensor: Tensor) -> bool:
    """Return whether the tensor is 0, 1, 2 and so on along its last dimension, as positions are."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.numel() > _COUNTED:
        return False
    wide = tensor.reshape(-1, tensor.shape[-1])
    return tensor.shape[-1] > 1 and bool((wide == torch.arange(wide.shape[-1], device=wide.device)).all())
