"""The stages of the model that one rank holds, with what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.comm.comm_thread import CommThread
from gossamer.run.batches import MicroBatch
from gossamer.run.forward import Pipeline
from gossamer.run.step_runner import ModelPart, ModelRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStages:
    """The stages of one rank by number, the engine that computes them, their pipeline and the communication thread."""

    engine: ModelRuntime
    pieces: Mapping[int, ModelPart]
    pipeline: Pipeline
    pump: CommThread

    def weights(self, batches: Mapping[int, MicroBatch]) -> dict[int, float]:
        """Return the number of valid labels of every micro-batch."""
        return {number: float(self.engine.objective.weight(piece.rows)) for number, piece in batches.items()}
