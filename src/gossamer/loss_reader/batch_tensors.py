"""Where the tensors that a loop made of a batch have rows: as the batch has them, else as their sizes tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.loss_reader.row_dims import PART, ROWS, RowDims, RowsLost, RowsTogether, plain, refolded, with_rows
from gossamer.loss_reader.row_flow import RowOrigin

_COUNTED = 1 << 20  # numbers that are looked at
_SHOWN = 64  # of each row, as they are looked up among those of the batch


@dataclass(frozen=True, slots=True)
class OfBatch(RowOrigin):
    """`leaves`: the tensors of a batch, and the dimension of each that has rows. `first`: of a tensor like none of
    them. `owned`: where the memory of the models' own tensors begins. `folds`: whether a first dimension that is a
    multiple of the rows is of rows.
    """

    rows: int
    leaves: tuple[tuple[Tensor, int], ...] = ()
    first: int = 0
    owned: frozenset[int] = frozenset()
    folds: bool = True

    def layout(self, tensor: Tensor, *, is_input: bool) -> RowDims | None:
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
        return self._of_sizes(sizes, list(range(len(sizes))), is_input=self.folds) if sizes else None

    def _of_leaf(self, tensor: Tensor) -> RowDims | None:
        """That of a view of a tensor of the batch."""
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
        """That of a copy of a tensor of the batch, as it is or with its first two dimensions turned, and folded."""
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
        """That of a tensor that was put together of the rows' own numbers (rows after rows, steps before rows, windows
        of images): where each row's are found among its own in the batch. None where several places fit, or none.
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
        """Those that the batch has of each row, of the tensor's kind."""
        wide = [
            leaf.detach().movedim(dim, 0).reshape(self.rows, -1).to("cpu", tensor.dtype)
            for leaf, dim in self.leaves
            if leaf.is_floating_point() == tensor.is_floating_point() and leaf.numel() <= _COUNTED
        ]
        return list(torch.cat(wide, 1)) if wide else []

    def _folds(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(dimension, how many times all rows, how many of each one) of what may have rows."""
        for at, size in enumerate(sizes):
            whole = size // self.rows if size % self.rows == 0 else 0
            yield from ((at, whole // each, each) for each in range(1, whole + 1) if whole % each == 0)

    def _is_of(self, tensor: Tensor, place: tuple[int, int, int], own: Sequence[Tensor]) -> bool:
        at, many, each = place
        rows = tensor.detach().movedim(at, 0).reshape(many, self.rows, each, -1).movedim(1, 0).reshape(self.rows, -1)
        shown = rows[:, :: max(1, rows.shape[1] // _SHOWN)].cpu()
        if len(set(shown.flatten().tolist())) < 3:
            return False  # a mask is like any other
        return all(bool(torch.isin(one, known).all()) for one, known in zip(shown, own, strict=True))

    def _like(self, sizes: Sequence[int]) -> int | None:
        """The dimension that has rows in a tensor of the batch of these sizes."""
        return next((dim for leaf, dim in self.leaves if leaf.shape == tuple(sizes)), None)

    def _of_sizes(self, sizes: Sequence[int], order: Sequence[int], *, is_input: bool) -> RowDims | None:
        """`order`: the dimensions, from the one that varies slowest."""
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
    """Whether it has as many rows as steps."""
    return tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1]


def _refolded(layout: RowDims, sizes: Sequence[int], rows: int) -> RowDims | None:
    try:
        return refolded(layout, sizes, rows, "a view")
    except (RowsTogether, RowsLost):
        return None  # it was made of the batch in a way that is not seen


def _outer_first(tensor: Tensor) -> list[int]:
    """Dimensions as they lie in memory; those that are spread out last."""
    strides: tuple[int, ...] = tuple(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda at: (strides[at] == 0, -strides[at]))


def _is_constant(tensor: Tensor) -> bool:
    """Whether it is one number everywhere, as a first hidden state."""
    first = tensor[(0,) * tensor.dim()]
    return tensor.numel() > 1 and tensor.numel() <= _COUNTED and bool((tensor == first).all())


def _is_count(tensor: Tensor) -> bool:
    """Whether it is 0, 1, 2 and so on, as positions are, once or for every row."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.numel() > _COUNTED:
        return False
    wide = tensor.reshape(-1, tensor.shape[-1])
    return tensor.shape[-1] > 1 and bool((wide == torch.arange(wide.shape[-1], device=wide.device)).all())
