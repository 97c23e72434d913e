"""Labels of selected rows: two dimensions with the same rows in the same order have the same label."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from gossamer.loss_reader import row_dims as lay


class RowLabels:
    """The row numbers of dimensions with selected rows, by label."""

    def __init__(self, rows: int) -> None:
        """Start without selections. `rows`: of this rank's batch."""
        self._rows = rows
        self._picked: dict[str, Tensor] = {}

    def of(self, dim: lay.Dim) -> Tensor | None:
        """Return the row number of each element along a dimension; None if unknown."""
        found = torch.zeros(1, dtype=torch.long)
        for size, label in dim:
            if label in ("", lay.SPREAD):
                found = found.repeat_interleave(size)
                continue
            own = torch.arange(size) % max(1, self._rows) if label == lay.ROWS else self._picked.get(label)
            if own is None or own.numel() != size or bool(found.any()):
                return None
            found = own.repeat(found.numel())
        return found

    def dim(self, numbers: Tensor) -> lay.Dim:
        """Return a dimension with these row numbers: all rows of the batch in sequence, else one with its own label."""
        for one in self.folds(numbers.numel()):
            if (known := self.of(one)) is not None and torch.equal(known, numbers):
                return one
        label = f"{lay.ORDERED if self._is_ordered(numbers) else lay.PICKED}/{self.code(numbers)}"
        self._picked[label] = numbers
        return ((numbers.numel(), label),)

    def folds(self, size: int) -> list[lay.Dim]:
        """Return the dimensions of `size` that have all rows: each repeated in place, or all repeated in sequence."""
        many, rest = divmod(size, max(1, self._rows))
        if rest or not many:
            return []
        if many == 1:
            return [((self._rows, lay.ROWS),)]
        return [((self._rows, lay.ROWS), (many, "")), ((size, lay.ROWS),)]

    def code(self, numbers: Tensor) -> int:
        """Return a 32-bit hash of row numbers."""
        return zlib.crc32(numbers.detach().cpu().contiguous().numpy().tobytes())

    def _is_ordered(self, numbers: Tensor) -> bool:
        """Return whether rows are in the order of the batch, or each occurs equally often."""
        if bool((numbers.diff() >= 0).all()):
            return True
        return len(set(numbers.bincount(minlength=self._rows).tolist())) == 1
