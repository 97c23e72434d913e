"""Gradient buckets: many tensors in one flat buffer, so that one message carries them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from gossamer.spec.errors import bad_input
from gossamer.spec.row_range import RowRange, parts_of

_LEAST_BYTES = 2**20  # of a bucket: smaller ones cost more in messages than they hide


@dataclass(frozen=True, slots=True)
class Entry:
    """A named tensor inside a flat buffer, at elements [start, start + numel)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a bucket: name, shape and offset of every tensor. It is known before there is any data."""

    entries: tuple[Entry, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def numel(self) -> int:
        return sum(e.numel for e in self.entries)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Lay out `tensors` (all of one dtype and device) one after another."""
        entries, start = [], 0
        for name, tensor in tensors.items():
            entries.append(Entry(name, tuple(tensor.shape), start))
            start += tensor.numel()
        first = next(iter(tensors.values()))
        return Layout(tuple(entries), first.dtype, first.device)

    def allocate(self) -> Bucket:
        """Return a bucket of zeros."""
        return Bucket(self, torch.zeros(self.numel, dtype=self.dtype, device=self.device))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer and its layout."""

    layout: Layout
    flat: Tensor  # (numel,)

    def slices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view) of every tensor, in its own shape."""
        for e in self.layout.entries:
            yield e.name, self.flat[e.start : e.start + e.numel].view(e.shape)


def sum_dtype(of: torch.dtype) -> torch.dtype:
    """Return the dtype in which an exchange without loss adds up numbers: float64 of float64 ones, else float32."""
    return torch.float64 if of is torch.float64 else torch.float32


def as_float(layout: Layout) -> Layout:
    """Return the same layout in float32, the dtype in which lossy methods compute."""
    return replace(layout, dtype=torch.float32)


def as_computed(layout: Layout, *, lossless: bool) -> Layout:
    """Return the same layout in the dtype in which an exchange around another computes: without loss, that of sums."""
    return replace(layout, dtype=sum_dtype(layout.dtype)) if lossless else as_float(layout)


def partition(tensors: Mapping[str, Tensor], *, bucket_bytes: int, at_least: int = 4) -> tuple[Layout, ...]:
    """Partition `tensors` into bucket layouts of at most `bucket_bytes`, in the order of backward (last tensors first).

    Small models still get about `at_least` buckets of 1 MiB or more, so that communication starts before backward ends.
    With `at_least` above 1 a bucket also holds at most half of what is left, down to 1 MiB: what is sent after backward
    has ended is small. Tensors of different dtype or device never share a bucket; a tensor larger than a bucket has its
    own.
    """
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    cap = min(bucket_bytes, max(_LEAST_BYTES, -(-total // at_least)))
    open_buckets: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    numel = dict[tuple[torch.dtype, torch.device], int]()  # of each open bucket: there may be thousands of tensors
    done: list[Layout] = []
    left = total  # bytes that are in no finished bucket
    for name, tensor in reversed(list(tensors.items())):
        kind = (tensor.dtype, tensor.device)
        held = open_buckets.setdefault(kind, {})
        size = (numel.get(kind, 0) + tensor.numel()) * tensor.element_size()
        if held and size > (min(cap, max(_LEAST_BYTES, left // 2)) if at_least > 1 else cap):
            done.append(Layout.of(held))
            left -= done[-1].numel * tensor.element_size()
            open_buckets[kind], numel[kind] = {}, 0
            held = open_buckets[kind]
        held[name] = tensor
        numel[kind] = numel.get(kind, 0) + tensor.numel()
    return (*done, *(Layout.of(held) for held in open_buckets.values() if held))


def divided(tensors: Mapping[str, Tensor], *, bucket_bytes: int) -> dict[str, Tensor]:
    """Return `tensors` with the row ranges of each that is as large as two buckets in its place, by their names.

    They are as equal as can be, each at least a bucket and less than two of them, as far as rows are.
    """
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        count = tensor.numel() * tensor.element_size() // bucket_bytes
        if count < 2 or not tensor.dim() or tensor.shape[0] < 2:
            found[name] = tensor
        else:
            rows = parts_of(name, tensor.shape[0], count)
            found |= {one.name: tensor[one.start : one.stop] for one in rows}
    return found


def divided_as(tensors: Mapping[str, Tensor], buckets: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Return `tensors` with the row ranges that the buckets of a plan name in place of those that they divide.

    Raise BadInput where the parts of a tensor are not all of its rows, each once, or where one shares a bucket.
    """
    parts = dict[str, list[RowRange]]()
    for names in buckets:
        for name in names:
            if name in tensors or (part := RowRange.read(name)) is None or part.whole not in tensors:
                continue
            if len(names) > 1:
                raise _refused(name, f"a bucket of {len(names)} tensors", "give each part a bucket of its own")
            parts.setdefault(part.whole, []).append(part)
    for whole, rows in parts.items():
        rows.sort()
        edges = [0, *(one.stop for one in rows)]
        count = tensors[whole].shape[0] if tensors[whole].dim() else 1
        if [one.start for one in rows] != edges[:-1] or edges[-1] != count or any(r.start >= r.stop for r in rows):
            got = ", ".join(f"[{one.start}:{one.stop}]" for one in rows)
            raise _refused(whole, f"the rows {got} of {count}", "name every row once, or the parameter as a whole")
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name in parts:
            found |= {one.name: tensor[one.start : one.stop] for one in parts[name]}
        else:
            found[name] = tensor
    return found


def _refused(name: str, got: str, do: str) -> Exception:
    return bad_input(wanted=f"parts of {name} that are all of its rows", got=got, do=do, key="plan.buckets")
