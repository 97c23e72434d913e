"""Weights that are read tile by tile: from the parameter where it is in memory, from a tier file where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, eq=False)
class TiledWeight:
    """The weight of a layer that runs in tiles of rows. `rows`: (first, end) of each tile.

    `read` returns the rows of a tile by its number where the parameter is not in memory. `is_running`: the layer runs;
    whatever reads the parameter at other times needs it whole.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    read: Callable[[int], Tensor] | None = None
    is_running: bool = False

    def part(self, weight: Tensor, index: int) -> Tensor:
        """Return the rows of a tile, which stay until the next tile is asked for."""
        if self.read is not None:
            return self.read(index)
        low, high = self.rows[index]
        return weight[low:high]
