"""The log-probabilities of answers under the model that a run begins with, computed once and kept in a file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, Message
from gossamer.loss import Loss
from gossamer.loss.dpo import ANSWERS, REFERENCE
from gossamer.loss.inputs.answers import answer_log_probabilities
from gossamer.model.side_effects import evaluating, untouched
from gossamer.model.split.constructor_state import tensors_of
from gossamer.run.batches import Batches, MicroBatch, RankBatch, WidenedBatches, moved, part, row_slices
from gossamer.run.engine import pieces_of, pipeline_of
from gossamer.run.forward import Pipeline, run_forward
from gossamer.run.kept_tensors import KeptTensors
from gossamer.run.parts import Parts
from gossamer.run.staged_model import Forward
from gossamer.run.step_runner import ModelPart, ModelRuntime

VALUES = "log_probabilities"  # in the file
_TOGETHER = 8  # micro-batches that are prepared at a time


class ReferencedBatches(WidenedBatches):
    """Batches of answers with their log-probabilities under the initial model, (n,) float32, as `loss.reference`.

    They are 0 until they are computed: what runs the model before (planning, the proof of a layout) needs the key, and
    compares gradients of any reference alike.
    """

    def __init__(self, inner: Batches, values: Tensor | None = None) -> None:
        super().__init__(inner)
        self._values = values

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        index = torch.from_numpy(np.asarray(indices, np.int64))
        values = torch.zeros(len(index)) if self._values is None else self._values[index]
        return {**self.inner.batch(indices), REFERENCE: values}


@dataclass(frozen=True, slots=True)
class AnswerLogProbabilities(Loss):
    """A loss that returns the log-probability of every answer instead, (rows,)."""

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return answer_log_probabilities(output, batch[ANSWERS])

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePass:
    """The pass of the initial model over all answers. All ranks make it together, each replica its part.

    `folder`: of the file that keeps the result, written by ranks with `writes`; `data`: the fingerprint of the data;
    `tell`: takes a message for the user.
    """

    parts: Parts
    engine: ModelRuntime
    pump: CommThread
    folder: Path
    data: str
    writes: bool
    at: Callable[[int, str], None]
    tell: Callable[[str], None]

    def made(self) -> Parts:
        """Return the parts with the log-probabilities in their batches.

        They are read from the file of an earlier start with the same initial values and data, where all ranks have it.
        """
        sides = [self.parts.train, *(one.batches for one in self.parts.validation.values())]
        count = sum(map(len, sides))
        began = time.perf_counter()
        kept = KeptTensors(
            file=self.folder / f"reference-{self._key()}.safetensors",
            fits=lambda found: VALUES in found and found[VALUES].shape == (count,),
            writes=self.writes,
        )
        found, is_there = kept.read_or_made(
            self.pump.channel, lambda: {VALUES: torch.cat([self._computed(side) for side in sides])}
        )
        values = found[VALUES]
        spent = time.perf_counter() - began
        how = f", from {kept.file.name}" if is_there else f" by the initial model, {spent:.1f} s"
        self.tell(f"reference: log-probabilities of {count:,} answers{how}")
        train, *others = (
            ReferencedBatches(_inner(side), those)
            for side, those in zip(sides, torch.split(values, [len(side) for side in sides]), strict=True)
        )
        validation = {
            name: replace(one, batches=batches)
            for (name, one), batches in zip(self.parts.validation.items(), others, strict=True)
        }
        return replace(self.parts, train=train, validation=validation)

    def _key(self) -> str:
        """Return a hash of the data, and of the initial values on all ranks; replicas have the same ones."""
        mine = hashlib.sha256()
        for name, tensor in sorted(self._held().items()):
            whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            mine.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode() + whole.numpy().tobytes())
        mine.update(self.parts.config.train.precision.encode())
        rows = gathered(self.pump.channel, [float(int.from_bytes(mine.digest()[:6], "big"))])  # 48 bits are exact
        seen = sorted(set(rows.flatten().tolist()))
        return hashlib.sha256(f"{self.data} {seen}".encode()).hexdigest()[:16]

    def _held(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of this rank by name."""
        cut, tensors = self.parts.cut, tensors_of(self.parts.module)
        return {name: tensor for name, tensor in tensors.items() if cut is None or name in cut.holds}

    def _computed(self, side: Batches) -> Tensor:
        """Return the log-probabilities of all answers of one side, (n,) float32, on all ranks."""
        plan, total = self.parts.plan, len(side)
        replica, _ = plan.axes.place(self.pump.channel.rank)
        pairs = part(total // side.together, replica, plan.mesh.replica)
        mine = np.arange(pairs.start * side.together, pairs.stop * side.together)
        largest = max(side.together, plan.rows[replica] // plan.microbatches[replica])
        chosen = [mine[rows] for rows in row_slices(len(mine), largest)]
        found = torch.zeros(2, total, dtype=torch.float32, device=self.engine.device)  # sums, and by how many ranks
        pieces, pipeline = self._pieces()
        with untouched(self.engine.module), evaluating(self.engine.module), torch.no_grad():  # no dropout
            for first in range(0, len(chosen), _TOGETHER):
                self.at(0, "reference")
                for number, values in self._run(side, chosen[first : first + _TOGETHER], pieces, pipeline).items():
                    index = torch.from_numpy(chosen[first + number]).to(found.device)
                    found[0, index], found[1, index] = values, 1.0
        (sums,) = self.pump.channel.start(Message((found.view(-1),), Collective.SUM)).wait()
        both = sums.view(2, total).cpu()
        return both[0] / both[1].clamp(min=1)

    def _run(
        self,
        side: Batches,
        chosen: list[np.ndarray[Any, Any]],
        pieces: Mapping[int, ModelPart],
        pipeline: Pipeline,
    ) -> dict[int, Tensor]:
        forward = pipeline.forward_only(len(chosen))
        batches = {n: MicroBatch(0, moved(side.batch(chosen[n]), self.engine.device)) for n in sorted(forward.batches)}
        return run_forward(self.pump, pieces, forward, batches, moves=lambda: self.at(0, "reference"))

    def _pieces(self) -> tuple[dict[int, ModelPart], Pipeline]:
        """Return the stages of this rank with log-probabilities in place of the loss, and their pipeline."""
        channel, cut = self.pump.channel, self.parts.cut
        objective = AnswerLogProbabilities()
        if cut is not None:
            cut = replace(cut, ways=cut.ways.running(Forward(objective, self.engine.precision, self.engine.device)))
        engine = replace(self.engine, objective=objective)
        return pieces_of(replace(self.parts, cut=cut), engine), pipeline_of(self.parts, channel.rank, channel.levels)


def _inner(side: Batches) -> Batches:
    return side.inner if isinstance(side, ReferencedBatches) else side
