"""Which rows picked rows are: two dimensions of the same rows in the same order have the same label."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from gossamer.loss_reader import row_dims as lay


class RowLabels:
    """The numbers of the rows that were picked, by the label that they were given."""

    def __init__(self, rows: int) -> None:
        """`rows`: of this rank's batch."""
        self._rows = rows
        self._picked: dict[str, Tensor] = {}

    def of(self, dim: lay.Dim) -> Tensor | None:
        """The row of each number along a dimension; None where that is not known."""
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
        """A dimension of these rows."""
        for one in self.folds(numbers.numel()):
            if (known := self.of(one)) is not None and torch.equal(known, numbers):
                return one
        label = f"{lay.ORDERED if self._is_ordered(numbers) else lay.PICKED}/{self.code(numbers)}"
        self._picked[label] = numbers
        return ((numbers.numel(), label),)

    def folds(self, size: int) -> list[lay.Dim]:
        """Dimensions of `size` with all rows: each several times one after the other, or all of them several times."""
        many, rest = divmod(size, max(1, self._rows))
        if rest or not many:
            return []
        if many == 1:
            return [((self._rows, lay.ROWS),)]
        return [((self._rows, lay.ROWS), (many, "")), ((size, lay.ROWS),)]

    def code(self, numbers: Tensor) -> int:
        return zlib.crc32(numbers.detach().cpu().contiguous().numpy().tobytes())

    def _is_ordered(self, numbers: Tensor) -> bool:
        """Whether rows are in the order of the batch, or each as often as any other."""
        if bool((numbers.diff() >= 0).all()):
            return True
        return len(set(numbers.bincount(minlength=self._rows).tolist())) == 1
