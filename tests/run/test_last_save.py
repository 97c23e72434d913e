"""The last save of a run: the ranks wait together for the disks, as each tells the others that it still writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from gossamer.run.checkpoint_directory import CheckpointDirectory
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.trainer import Trainer
from gossamer.store.checkpoint import SaveStatus

WRITES = 2.0  # what a rank says while it writes


@dataclass
class Disk:
    """A store whose save in flight ends after so many waits; it counts those that were without limit."""

    waits: int
    saves: list[int] = field(default_factory=list)

    def wait(self, patience_s: float) -> bool:
        self.waits -= 1
        return self.waits < 0

    def poll(self) -> list[Any]:
        return []

    def save(self, step: int, *_: object, patience_s: float | None = 1.0, **__: object) -> SaveStatus:
        assert self.waits < 0 or patience_s is not None, "it waits for the disk out of the others' sight"
        self.saves.append(step)
        return SaveStatus.STARTED


def saving(folder: Path, disk: Disk, *, others: Iterator[float], last: bool) -> tuple[list[float], list[str]]:
    """What a rank tells the other one as it saves step 4, and where it says that it is."""
    said: list[float] = []
    spots: list[str] = []

    def gather(row: tuple[float, ...]) -> torch.Tensor:
        said.append(row[0])
        return torch.tensor([row, (next(others),)])

    saver = CheckpointManager(directory=CheckpointDirectory(path=folder), rank=0, sink=lambda _: None, identity={})
    saver._store = cast(Any, disk)
    contents = SimpleNamespace(meta=dict, pieces=lambda writer, writers: [], is_in_file=False)
    saver.contents = cast(Any, contents)
    saver.progress.step = 4
    nothing = SimpleNamespace(settle=lambda step: None, same_everywhere=lambda step: None)
    trainer = SimpleNamespace(
        watch=SimpleNamespace(best=None),
        around=SimpleNamespace(saver=saver, at=lambda step, phase: spots.append(f"{phase} {step}")),
        outer=SimpleNamespace(apart=nothing),
        verifier=nothing,
        descent=nothing,
        replica=SimpleNamespace(gather=gather),
        progress=saver.progress,
    )
    Trainer._save(cast(Trainer, trainer), 4, last=last)
    assert disk.saves == [4]
    return said, spots


def test_ranks_tell_one_another_that_they_write_until_none_does(tmp_path: Path) -> None:
    said, spots = saving(tmp_path, Disk(waits=2), others=iter([0.0, 0.0, WRITES, 0.0]), last=True)
    assert said == [WRITES, WRITES, 0.0, 0.0]
    assert spots == ["save 4"] * 5, "it makes progress, as the supervisor sees it"


def test_a_save_that_may_be_skipped_waits_for_nobody(tmp_path: Path) -> None:
    said, _ = saving(tmp_path, Disk(waits=2), others=iter([]), last=False)
    assert said == []
