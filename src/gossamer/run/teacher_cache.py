"""What a run keeps of its teacher: its most probable words for every token of the training data, computed once.

File `teacher-KEY.safetensors` in the run's folder, KEY a hash of teacher, data, temperature and k:
    words (n, T, k) int32, log_probabilities (n, T, k + 1) float32, the last one that of all other words together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, Message
from gossamer.loss.distillation import Distillation
from gossamer.model.precision import Precision
from gossamer.run.batches import Batches, RankBatch, WidenedBatches, moved, part, row_slices
from gossamer.run.kept_tensors import KeptTensors, Tensors
from gossamer.run.parts import Parts
from gossamer.run.teacher import LOG_PROBABILITIES, WORDS, Teacher, most_probable

_TOGETHER = 32  # sequences between two messages


class KeptTeacherBatches(WidenedBatches):
    """Batches with what was kept of the teacher, the tensors of its file."""

    def __init__(self, inner: Batches, kept: Tensors) -> None:
        super().__init__(inner)
        self._kept = kept

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        index, kept = torch.from_numpy(np.asarray(indices, np.int64)), self._kept
        own = {WORDS: kept["words"][index], LOG_PROBABILITIES: kept["log_probabilities"][index]}
        return {**self.inner.batch(indices), **own}


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPass:
    """The pass of a teacher over the training data. All ranks make it together; those with a `teacher` divide it.

    `words`: logits that count, None: all; `digest`, `data`: of the teacher and of the data; `tell`: takes a message for
    the user.
    """

    parts: Parts
    inner: Distillation
    teacher: Teacher | None
    words: int | None
    precision: Precision
    pump: CommThread
    folder: Path
    digest: str
    data: str
    writes: bool
    at: Callable[[int, str], None]
    tell: Callable[[str], None]

    def made(self) -> Batches:
        """Return the training data with the teacher's words, from an earlier start's file where all ranks have it."""
        k, count = self.inner.top_k, len(self.parts.train)
        said = f"{self.digest} {self.data} {self.inner.temperature} {k} {self.words}"
        file = self.folder / f"teacher-{hashlib.sha256(said.encode()).hexdigest()[:16]}.safetensors"
        stored = KeptTensors(file=file, fits=lambda found: _fits(found, count, k), writes=self.writes)
        kept, is_there = stored.read_or_made(self.pump.channel, lambda: self._computed(count, k))
        tokens = kept["words"].shape[:-1].numel()
        how = "from" if is_there else "computed once, in"
        self.tell(f"its {k} most probable words of {tokens:,} tokens, {how} {file.name}; it is not in memory now")
        return KeptTeacherBatches(self.parts.train, kept)

    def _computed(self, count: int, k: int) -> Tensors:
        holds = gathered(self.pump.channel, [float(self.teacher is not None)])[:, 0]
        before, holders = int(holds[: self.pump.channel.rank].sum()), int(holds.sum())
        found = list[Tensor]()
        for rows in row_slices(count, _TOGETHER):
            self.at(0, "teacher")
            every = np.arange(rows.start, rows.stop)
            batch = self.parts.train.batch(every)
            both = torch.zeros(*batch["labels"].shape, 2 * k + 1, device=self.parts.device)
            if self.teacher is not None and len(mine := part(len(every), before, holders)):
                some = {name: one[mine.start : mine.stop] for name, one in batch.items()}
                both[mine.start : mine.stop] = self._of(moved(some, self.parts.device), k)
            (sums,) = self.pump.channel.start(Message((both.view(-1),), Collective.SUM)).wait()
            found.append(sums.view(both.shape).cpu())
        whole = torch.cat(found)
        return {"words": whole[..., :k].to(torch.int32).contiguous(), "log_probabilities": whole[..., k:].contiguous()}

    @torch.no_grad()
    def _of(self, batch: RankBatch, k: int) -> Tensor:
        """Return words and log-probabilities side by side, (*, 2 k + 1) float32: numbers of words are exact in it."""
        assert self.teacher is not None
        shape = batch["labels"].shape
        with self.precision.autocast(self.parts.device):
            rows = replace(self.teacher.rows(batch, len(shape) + 1), words=self.words)
        known = most_probable(rows, k, temperature=self.inner.temperature, tile=self.inner.tile_tokens)
        return torch.cat([known.words.float(), known.log_probabilities], 1).view(*shape, 2 * k + 1)


def _fits(found: Tensors, count: int, k: int) -> bool:
    """Return whether these are the words of `count` sequences."""
    words, logs = found.get("words"), found.get("log_probabilities")
    if words is None or logs is None or len(words) != count or words.shape[-1] != k:
        return False
    return words.dtype is torch.int32 and logs.shape == (*words.shape[:-1], k + 1) and int(words.min()) >= 0
