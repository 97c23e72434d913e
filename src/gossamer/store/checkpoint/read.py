"""Reading a checkpoint: any region of any tensor from any stored layout (resharding), each slice checked before use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch, bad_input
from gossamer.spec.suggest import nearest
from gossamer.store.checkpoint.checksum import dtype_of
from gossamer.store.checkpoint.commit import list_checkpoints, locate
from gossamer.store.checkpoint.manifest import read_manifest
from gossamer.store.checkpoint.shard import Placed, Shard, ShardReader
from gossamer.store.slices import REPLICATED, Extent, Slice


class Checkpoint:
    """A committed checkpoint. Opening reads the manifest alone; files are mapped and checked when first touched."""

    def __init__(self, folder: Path, step: int) -> None:
        """Raise CheckpointMismatch where the manifest is missing, damaged, or of another step."""
        self.folder = folder
        self.step = step
        manifest = read_manifest(folder, step)
        self.ranks = len(manifest.parts)
        self._meta = tuple(part.meta for part in manifest.parts)
        self._shards = {part.shard.file: part.shard for part in manifest.parts}
        self._held: dict[tuple[str, int], dict[Slice, tuple[Shard, Placed]]] = defaultdict(dict)
        for shard in self._shards.values():
            for placed in shard.placed:
                self._held[placed.where.name, placed.where.replica].setdefault(placed.where, (shard, placed))
        self._replicas: dict[str, list[int]] = defaultdict(list)
        for name, replica in sorted(self._held):
            self._replicas[name].append(replica)
        self._open: dict[str, ShardReader] = {}
        self._checked: set[Slice] = set()

    @property
    def meta(self) -> Mapping[str, Any]:
        """The `meta` that the leader (rank 0) gave to `save`."""
        return self._meta[0]

    def rank_meta(self, rank: int) -> Mapping[str, Any]:
        """Return the `meta` that rank `rank` of the saving run gave to `save`."""
        return self._meta[rank]

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(self._replicas)

    def replicas(self, name: str) -> tuple[int, ...]:
        """Return the replicas stored of a tensor: -1 for a replicated one, else the ranks whose state it is."""
        return tuple(self._replicas.get(name, ()))

    def slices(self) -> tuple[Slice, ...]:
        """Return all stored slices."""
        return tuple(where for held in self._held.values() for where in held)

    def shape(self, name: str, replica: int = REPLICATED) -> Extent:
        """Return the global shape of a tensor."""
        return next(iter(self._find(name, replica))).shape

    def dtype(self, name: str, replica: int = REPLICATED) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        _, placed = next(iter(self._find(name, replica).values()))
        return dtype_of(placed.dtype)

    def read(
        self,
        name: str,
        start: Extent | None = None,
        size: Extent | None = None,
        replica: int = REPLICATED,
        out: Tensor | None = None,
    ) -> Tensor:
        """Read the box `start .. start + size` of a tensor (default: all of it), assembled from its stored slices.

        `out` of shape `size` receives it, on its own device and in its own dtype; else a CPU tensor of the stored
        dtype. Only the slices that overlap with the box are read; the first use of each checks all of that slice.
        Raises CheckpointMismatch where one is damaged, BadInput where the tensor or the box does not exist.
        """
        held = self._find(name, replica)
        shape = next(iter(held)).shape
        start = (0,) * len(shape) if start is None else tuple(start)
        size = tuple(n - at for n, at in zip(shape, start, strict=False)) if size is None else tuple(size)
        _check_box(Slice.whole(name, shape, replica), start, size)
        if out is None:
            out = torch.empty(size, dtype=self.dtype(name, replica))
        elif tuple(out.shape) != size:
            raise bad_input(
                wanted=f"a tensor of shape {size} for {name}", got=f"{tuple(out.shape)}", do="pass one of that shape"
            )
        for where, (shard, placed) in held.items():
            shared = where.overlap(start, size)
            if shared is not None:
                source = self._checked_data(shard, placed)
                _box(out, start, *shared).copy_(_box(source, where.start, *shared))
        return out

    def verify(self, *, beat: Callable[[], None] = lambda: None) -> None:
        """Read and check all shards; raises CheckpointMismatch naming the first altered file, tensor and slice.

        `beat` is called after every file.
        """
        for shard in self._shards.values():
            self._reader(shard).check_all()
            self._checked.update(placed.where for placed in shard.placed)
            beat()

    def _find(self, name: str, replica: int) -> dict[Slice, tuple[Shard, Placed]]:
        held = self._held.get((name, replica))
        if held is not None:
            return held
        there = self.replicas(name)
        if there:
            raise bad_input(
                wanted=f"replica {replica} of {name}",
                got=f"replicas {there} in {self.folder}",
                do="ask for one of the replicas that the checkpoint holds",
            )
        raise bad_input(wanted=f"tensor {name!r}", got=f"none in {self.folder}", do=nearest(name, self.names()))

    def _checked_data(self, shard: Shard, placed: Placed) -> Tensor:
        reader = self._reader(shard)
        if placed.where not in self._checked:
            reader.check(placed)
            self._checked.add(placed.where)
        return reader.data(placed)

    def _reader(self, shard: Shard) -> ShardReader:
        if shard.file not in self._open:
            self._open[shard.file] = ShardReader(self.folder, shard)
        return self._open[shard.file]


def open_checkpoint(directory: Path | str, step: int) -> Checkpoint:
    """Open a committed checkpoint; raises BadInput where there is none, CheckpointMismatch for a damaged manifest."""
    folder = locate(Path(directory), step)
    if folder is None:
        steps = list_checkpoints(directory)
        there = "steps " + ", ".join(map(str, steps)) if steps else "no checkpoint"
        raise bad_input(
            wanted=f"a checkpoint of step {step}",
            got=f"{there} in {directory}",
            do="give the step of a checkpoint that is there",
        )
    return Checkpoint(folder, step)


def latest_good(
    directory: Path | str, *, until: int | None = None, beat: Callable[[], None] = lambda: None
) -> tuple[Checkpoint, dict[int, str]]:
    """Return the newest checkpoint (of a step up to `until`) that verifies, and the damage of each newer one, by step.

    Reads all of it: in a run of several ranks one rank calls this and sends the step to the others. `beat` is called
    after every file. Raises CheckpointMismatch where there are checkpoints but none is good, BadInput where there are
    none.
    """
    problems: dict[int, str] = {}
    for step in list_checkpoints(directory):
        if until is not None and step > until:
            continue
        try:
            found = open_checkpoint(directory, step)
            found.verify(beat=beat)
        except CheckpointMismatch as error:
            problems[step] = f"step {step} is bad: {error}"
        else:
            return found, problems
    if problems:
        said = "; ".join(problems.values())
        raise CheckpointMismatch(f"no checkpoint in {directory} is intact: {said}: start a new run in another folder")
    upto = "" if until is None else f" of a step up to {until}"
    raise bad_input(
        wanted=f"a checkpoint{upto}", got=f"none in {directory}", do="let the run go on until its first checkpoint"
    )


def _check_box(whole: Slice, start: Extent, size: Extent) -> None:
    try:
        Slice(whole.name, whole.shape, start, size, whole.replica)
    except ValueError as error:
        raise bad_input(
            wanted="a part of a stored tensor", got=str(error), do="choose start and size inside that shape"
        ) from None


def _box(tensor: Tensor, origin: Extent, start: Extent, size: Extent) -> Tensor:
    """Return the box of a tensor whose first element lies at `origin` of the global tensor."""
    for dim, (zero, at, count) in enumerate(zip(origin, start, size, strict=True)):
        tensor = tensor.narrow(dim, at - zero, count)
    return tensor
