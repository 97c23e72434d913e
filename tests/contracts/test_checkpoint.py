"""What a checkpoint owes its reader, whatever was saved by however many ranks in whatever layout.

Layouts are found here by generation: random boxes that tile random tensors, dealt to random ranks, read back in
random boxes; equal bits, full coverage, stable meta, one committed folder, every bit under a checksum.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import latest_good, list_checkpoints, open_checkpoint
from gossamer.store.slices import Extent, NamedSlice, Slice
from store.crew import good, left_over, save

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def tiles(shape: Extent, rng: random.Random) -> list[tuple[Extent, Extent]]:
    """Boxes (start, size) that tile `shape`: cut at random places, again and again."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(rng.randrange(6)):
        start, size = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape)) if shape else 0
        if not shape or size[dim] < 2:
            boxes.append((start, size))
            continue
        cut = rng.randrange(1, size[dim])
        for low, count in ((0, cut), (cut, size[dim] - cut)):
            at, of = list(start), list(size)
            at[dim], of[dim] = start[dim] + low, count
            boxes.append((tuple(at), tuple(of)))
    return boxes


def box(tensor: Tensor, start: Extent, size: Extent) -> Tensor:
    for dim, (at, count) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, at, count)
    return tensor


def random_tensors(rng: random.Random) -> dict[tuple[str, int], Tensor]:
    found: dict[tuple[str, int], Tensor] = {}
    for i in range(rng.randrange(1, 8)):
        shape = tuple(rng.randrange(0 if rng.random() < 0.1 else 1, 7) for _ in range(rng.randrange(4)))
        bits = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(rng.randrange(2**30)))
        found[f"block.{i // 2}.t{i}", rng.choice((-1, -1, 0, 3))] = bits.to(rng.choice(DTYPES))
    return found


def dealt(tensors: dict[tuple[str, int], Tensor], ranks: int, rng: random.Random) -> list[list[NamedSlice]]:
    pieces: list[list[NamedSlice]] = [[] for _ in range(ranks)]
    for (name, replica), tensor in tensors.items():
        shape = tuple(tensor.shape)
        for start, size in tiles(shape, rng):
            pieces[rng.randrange(ranks)].append((Slice(name, shape, start, size, replica), box(tensor, start, size)))
    return pieces


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_reads_back_as_any_other(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    ranks = rng.randrange(1, 5)
    meta = {"seed": seed, "nested": {"list": [1, 2.5, None]}}
    good(save(tmp_path, seed, dealt(tensors, ranks, rng), meta))
    assert list_checkpoints(tmp_path) == (seed,) and left_over(tmp_path) == []
    checkpoint, problems = latest_good(tmp_path)
    assert problems == {}
    assert (checkpoint.step, checkpoint.ranks, checkpoint.meta) == (seed, ranks, meta)
    assert checkpoint.names() == tuple(sorted({name for name, _ in tensors}))
    for (name, replica), tensor in tensors.items():
        assert (checkpoint.shape(name, replica), checkpoint.dtype(name, replica)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(checkpoint.read(name, replica=replica), tensor)
        for start, size in tiles(tuple(tensor.shape), rng):
            assert torch.equal(checkpoint.read(name, start, size, replica), box(tensor, start, size))


@pytest.mark.parametrize("seed", range(12))
def test_no_altered_byte_goes_unnoticed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    good(save(tmp_path, 1, dealt(random_tensors(rng), 2, rng)))
    files = sorted((tmp_path / "step-00000001").iterdir())
    for _ in range(20):
        path = rng.choice(files)
        data = path.read_bytes()
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])
        with pytest.raises(CheckpointMismatch, match=path.name):
            open_checkpoint(tmp_path, 1).verify()
        path.write_bytes(data)
    open_checkpoint(tmp_path, 1).verify()
