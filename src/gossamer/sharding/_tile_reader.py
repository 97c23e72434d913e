"""Tiles of weights in a tier file: one is used while the next one of its layer is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from gossamer.sharding._sharded_parameters import hollow
from gossamer.sharding._tier_limits import TierAccount
from gossamer.sharding._tiled_weight import TiledWeight
from gossamer.store.tier_file import PAGE, TierFile, page_buffer, paged


@dataclass(frozen=True, slots=True)
class _Tile:
    """The bytes of a tile in the file: whole pages from `start` on, and in them the tensor from `skip` on."""

    start: int
    pages_bytes: int
    skip: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(param: Tensor, rows: tuple[int, int], offset: int) -> _Tile:
        """Return a tile of a parameter that starts at `offset`."""
        low, high = rows
        row_bytes = param.nbytes // max(1, param.shape[0])
        first = offset + low * row_bytes
        start = first // PAGE * PAGE
        pages = paged(offset + high * row_bytes) - start
        return _Tile(start, pages, first - start, (high - low, *param.shape[1:]), param.dtype)

    def of_pages(self, pages: Tensor) -> Tensor:
        """Return the tensor in its pages: aligned as the rows of a parameter in memory are."""
        count = prod(self.shape) * self.dtype.itemsize
        return pages[self.skip : self.skip + count].view(self.dtype).view(self.shape)


@dataclass(slots=True, eq=False)
class TileReader:
    """What reads tiles from a tier file. While one is used, a thread reads the next one of its layer."""

    file: TierFile
    offset_of: Callable[[str], int]
    params: Mapping[str, Tensor]
    weights: Sequence[TiledWeight]
    waited: Callable[[float], None]
    buffers: tuple[Tensor, Tensor]
    _used: int = 0
    _ahead: tuple[_Tile, Future[None]] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gossamer-tile-read"))

    @staticmethod
    def of(
        weights: Sequence[TiledWeight],
        params: Mapping[str, Tensor],
        file: TierFile,
        offset_of: Callable[[str], int],
        room: TierAccount,
        waited: Callable[[float], None],
    ) -> TileReader:
        """Take the weights out of memory; the file must hold them already. Two buffers stay in `room`."""
        size = largest_tile(weights, params)
        room.take(2 * size)
        held = {one.name: params[one.name] for one in weights}
        found = TileReader(file, offset_of, held, weights, waited, (page_buffer(size), page_buffer(size)))
        for one in weights:
            one.read = partial(found._read, one)
            held[one.name].data = hollow(held[one.name])
        return found

    def _read(self, weight: TiledWeight, index: int) -> Tensor:
        param, offset, began = self.params[weight.name], self.offset_of(weight.name), time.perf_counter()
        tile, ahead = _Tile.of(param, weight.rows[index], offset), self._ahead
        if ahead is not None:
            ahead[1].result()
            self._used = 1 - self._used
        if ahead is None or ahead[0] != tile:
            self._fill(tile, self._used)
        self._ahead = None
        if index + 1 < len(weight.rows):
            following = _Tile.of(param, weight.rows[index + 1], offset)
            self._ahead = following, self._thread.submit(self._fill, following, 1 - self._used)
        self.waited(time.perf_counter() - began)
        return tile.of_pages(self.buffers[self._used])

    def _fill(self, tile: _Tile, place: int) -> None:
        self.file.read(tile.start, self.buffers[place][: tile.pages_bytes])

    def leave(self, mapped: Mapping[str, Tensor]) -> None:
        """Back the weights by `mapped`, the file's memory."""
        for name, param in self.params.items():
            param.data = mapped[name]
        self.close()

    def close(self) -> None:
        """End the thread; layers read their parameters again."""
        for one in self.weights:
            one.read = None
        self._thread.shutdown()


def largest_tile(weights: Sequence[TiledWeight], params: Mapping[str, Tensor]) -> int:
    """Return the bytes of the pages of the largest tile."""
    each = (_Tile.of(params[one.name], rows, 0).pages_bytes for one in weights for rows in one.rows)
    return max(each, default=0)
