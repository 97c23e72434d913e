"""Ranks that save together, all in this process: each has its own writer and thread, and they meet in the directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.store.checkpoint import CheckpointWriter, SaveResult
from gossamer.store.slices import Extent, NamedSlice, Slice


def save(
    directory: Path, step: int, ranks: Sequence[list[NamedSlice]], meta: Any = None, **options: Any
) -> list[SaveResult]:
    """One save by `len(ranks)` ranks; the results in rank order."""
    options = {"deadline_s": 20.0, **options}
    writers = [CheckpointWriter(directory, rank, len(ranks), **options) for rank in range(len(ranks))]
    for writer, pieces in zip(writers, ranks, strict=True):
        writer.save(step, pieces, meta or {})
    return [result for writer in writers for result in finish(writer)]


def finish(writer: CheckpointWriter) -> list[SaveResult]:
    """How its saves ended."""
    writer.finish()
    return writer.poll()


def good(results: Sequence[SaveResult]) -> None:
    """All ranks saved."""
    assert results and all(result.ok for result in results), [result.error for result in results]


def whole(name: str, tensor: Tensor, replica: int = -1) -> NamedSlice:
    """A piece that is all of its tensor."""
    return Slice.whole(name, tuple(tensor.shape), replica), tensor


def rows(name: str, tensor: Tensor, low: int, high: int) -> NamedSlice:
    """A piece that is some rows."""
    start: Extent = (low, *(0 for _ in tensor.shape[1:]))
    return Slice(name, tuple(tensor.shape), start, (high - low, *tensor.shape[1:])), tensor[low:high]


def model(seed: int = 0) -> dict[str, Tensor]:
    """A few tensors of several shapes."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (12, 6), "layer.weight": (6, 9), "layer.bias": (6,), "cube": (4, 3, 6)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def halves(tensors: dict[str, Tensor]) -> list[list[NamedSlice]]:
    """Two ranks, each with half of the rows of every tensor."""
    return [
        [rows(name, tensor, 0, tensor.shape[0] // 2) for name, tensor in tensors.items()],
        [rows(name, tensor, tensor.shape[0] // 2, tensor.shape[0]) for name, tensor in tensors.items()],
    ]


def left_over(directory: Path) -> list[str]:
    """What lies there beside committed checkpoints."""
    return sorted(path.name for path in directory.iterdir() if "." in path.name)


def read_manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_bytes())["body"]
