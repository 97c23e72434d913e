"""Low-rank factors of the matrices of a bucket: which tensors are sent as factors, and the arithmetic on them.

A matrix M (rows, cols) is a tensor with its first dimension against all others. Its factors are stored transposed:
`left` (r, rows) and `right` (r, cols), M ~ left^T right. So both products are short-times-wide (left = right M^T and
right = left M), which is three times faster than M right^T and 25 times faster than M^T left^T on a CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from gossamer.comm.bucket import Entry, Layout
from gossamer.exchange import Exchange
from gossamer.spec.errors import bad_input

_SMALL = 1 << 16  # matrices of at most so many numbers are copied together, to be multiplied in one call
_ROWS = 256  # of a product that is written by a detour, at a time


def check_rank(rank: int) -> None:
    """Raise BadInput where a factor would have no column."""
    if rank < 1:
        raise bad_input(wanted="rank >= 1", got=repr(rank), do="give 4, say", key="rank")


def check_without_feedback(inner: Exchange, key: str, what: str, *, around: str) -> None:
    """Raise BadInput where the exchange `inner` of a factor keeps what it loses, which the next factor is not owed."""
    if inner.traits.remembers:
        wanted = f"an exchange without error feedback for {what}"
        do = f"choose another {key}, and write {{error_feedback: {{{around}: ...}}}} for error feedback"
        raise bad_input(wanted=wanted, got=repr(inner), do=do, key=key)


@dataclass(frozen=True, slots=True)
class MatrixBatch:
    """A batch of matrices of one shape and rank, by name and start in a bucket."""

    names: tuple[str, ...]
    starts: tuple[int, ...]
    rows: int
    cols: int
    rank: int

    @property
    def left_shape(self) -> tuple[int, int, int]:
        """Return the shape of the left factors."""
        return len(self.names), self.rank, self.rows

    @property
    def right_shape(self) -> tuple[int, int, int]:
        """Return the shape of the right factors."""
        return len(self.names), self.rank, self.cols

    def shape(self, side: str) -> tuple[int, int, int]:
        """Return the shape of the left ("p") or the right ("q") factors."""
        return self.left_shape if side == "p" else self.right_shape

    def matrices(self, flat: Tensor) -> Tensor:
        """Return the matrices, (batch, rows, cols): a view of `flat` where they are contiguous, else a copy."""
        numel = self.rows * self.cols
        if self._together:
            return flat.narrow(0, self.starts[0], len(self.names) * numel).view(-1, self.rows, self.cols)
        return torch.stack([flat[s : s + numel] for s in self.starts]).view(-1, self.rows, self.cols)

    def put(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Write left^T right to the matrices' ranges in `flat`."""
        numel = self.rows * self.cols
        if not self._together:  # then they are small
            for start, product in zip(self.starts, torch.bmm(left.mT, right), strict=True):
                flat[start : start + numel].view(self.rows, self.cols).copy_(product)
            return
        _multiply(left.mT, right, out=self.matrices(flat))

    def take(self, flat: Tensor, left: Tensor, right: Tensor) -> None:
        """Subtract left^T right from the matrices in `flat`."""
        numel = self.rows * self.cols
        if not self._together:  # then they are small
            for start, product in zip(self.starts, torch.bmm(left.mT, right), strict=True):
                flat[start : start + numel].view(self.rows, self.cols).sub_(product)
            return
        self.matrices(flat).baddbmm_(left.mT, right, alpha=-1)

    @property
    def left_numel(self) -> int:
        """Return the number of elements of all left factors."""
        return prod(self.left_shape)

    @property
    def right_numel(self) -> int:
        """Return the number of elements of all right factors."""
        return prod(self.right_shape)

    @property
    def _together(self) -> bool:
        return all(b - a == self.rows * self.cols for a, b in pairwise(self.starts))

    def gather(self, tensors: Mapping[str, Tensor], side: str) -> Tensor:
        """Return the factors of all matrices from the state's tensors, (batch, r, rows or cols): a copy."""
        return torch.stack([tensors[f"{side}@{name}"] for name in self.names])

    def named(self, factors: Tensor, side: str) -> dict[str, Tensor]:
        """Return the state's tensors of these factors, by "side@name"."""
        return {f"{side}@{name}": factor for name, factor in zip(self.names, factors.unbind(0), strict=True)}

    def random(self, side: str, device: torch.device) -> Tensor:
        """Return the first factors, seeded by name and side alone, since all ranks must hold the same ones."""
        _, rank, numel = self.shape(side)
        seeds = [zlib.crc32(f"{side}@{name}".encode()) for name in self.names]
        drawn = [torch.randn(rank, numel, generator=torch.Generator().manual_seed(s)) for s in seeds]
        return torch.stack(drawn).to(device)


@dataclass(frozen=True, slots=True)
class MatrixSplit:
    """A bucket divided into batches of matrices and dense ranges, (start, stop) each."""

    dense: tuple[tuple[int, int], ...]
    batches: tuple[MatrixBatch, ...]

    @property
    def dense_numel(self) -> int:
        return sum(stop - start for start, stop in self.dense)

    @property
    def factors(self) -> MatrixSplit:
        """Return the same matrices without the dense ranges, for a message of factors alone."""
        return MatrixSplit((), self.batches)

    def packed(self, layout: Layout, side: str) -> Layout:
        """Return the float32 layout of the message that `pack` makes of such a bucket and its factors of a side.

        side: "p", the left ones, or "q", the right ones.
        """
        # Names are unique to a bucket, so that buckets draw different random numbers.
        names = {e.start: e.name for e in layout.entries if e.numel}
        sizes: list[tuple[str, tuple[int, ...]]] = [(f"dense@{names[a]}", (b - a,)) for a, b in self.dense]
        sizes += [(f"{side}@{batch.names[0]}", batch.shape(side)) for batch in self.batches]
        starts = accumulate((prod(shape) for _, shape in sizes), initial=0)
        entries = tuple(Entry(name, shape, start) for (name, shape), start in zip(sizes, starts, strict=False))
        return Layout(entries, torch.float32, layout.device)

    def pack(self, flat: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Return the dense ranges and the factors, one after the other."""
        ranges = [flat[start:stop] for start, stop in self.dense]
        return torch.cat([flat[:0], *ranges, *(f.reshape(-1) for f in factors)])

    def unpack(self, message: Tensor, shapes: Sequence[tuple[int, int, int]], mean: Tensor) -> list[Tensor]:
        """Return the factors of a message, as views, and copy its dense ranges to their places in `mean`."""
        numels = [stop - start for start, stop in self.dense]
        parts = torch.split(message, [*numels, *(b * r * n for b, r, n in shapes)])
        for (start, stop), part in zip(self.dense, parts, strict=False):
            mean[start:stop].copy_(part)
        return [part.view(shape) for part, shape in zip(parts[len(numels) :], shapes, strict=True)]

    def factors_of(self, message: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Return the factors of a message, as views."""
        return self.factors.unpack(message[self.dense_numel :], shapes, message)

    def lose_dense(self, flat: Tensor, lost: Tensor | None = None) -> None:
        """Overwrite the dense ranges of `flat` with their compression error: zeros, or the first numbers of `lost`."""
        at = 0
        for start, stop in self.dense:
            size = stop - start
            flat[start:stop] = 0.0 if lost is None else lost[at : at + size]
            at += size

    def dense_of(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return a buffer with the dense ranges of a packed message in their places, zeros elsewhere."""
        found = torch.zeros_like(like)
        self.lose_dense(found, packed)
        return found


def split(layout: Layout, rank: int, *, steps: int) -> MatrixSplit:
    """Divide a bucket: a matrix is sent as factors where it is larger, sent `steps` times, than both factors once."""
    shapes = [(e, *_shape(e)) for e in layout.entries if len(e.shape) > 1 and e.numel]
    factored = [(e, n, m) for e, n, m in shapes if min(n, m) > 1 and min(rank, n, m) * (n + m) < steps * n * m]
    same: dict[tuple[int, ...], list[Entry]] = {}
    for e, rows, cols in factored:
        key = (rows, cols) if e.numel <= _SMALL else (rows, cols, e.start)
        same.setdefault(key, []).append(e)
    batches = [
        MatrixBatch(tuple(e.name for e in es), tuple(e.start for e in es), k[0], k[1], min(rank, k[0], k[1]))
        for k, es in same.items()
    ]
    taken = [(e.start, e.start + e.numel) for e, _, _ in factored]
    edges = [(0, 0), *taken, (layout.numel, layout.numel)]
    dense = tuple((before[1], after[0]) for before, after in pairwise(edges) if before[1] < after[0])
    return MatrixSplit(dense, tuple(batches))


def _shape(entry: Entry) -> tuple[int, int]:
    return entry.shape[0], entry.numel // entry.shape[0]


def _multiply(thin: Tensor, short: Tensor, *, out: Tensor) -> None:
    """thin (batch, rows, r) times short (batch, r, cols), into `out`.

    On a CPU, rows whose lengths are a multiple of a page's evict each other from the cache: with little to sum, a
    detour over rows that are a little longer takes a third of the time (2048 x 2048, r = 4: 1.2 ms against 3.3 ms).
    """
    rows, cols = out.shape[1:]
    if out.is_cuda or cols < 1024 or cols % 512 or short.shape[1] >= 16:
        torch.bmm(thin, short, out=out)
        return
    beside = torch.empty((len(out), min(rows, _ROWS), cols + 16), dtype=out.dtype, device=out.device)[..., :cols]
    for start in range(0, rows, _ROWS):
        here = slice(start, min(rows, start + _ROWS))
        part = beside[:, : here.stop - start]
        out[:, here].copy_(torch.bmm(thin[:, here], short, out=part))
