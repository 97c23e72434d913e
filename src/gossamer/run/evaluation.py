"""The evaluation of a run: its validation loss, and text that the model continues."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gossamer.model.side_effects import untouched
from gossamer.run.batches import Batches, Feed, MicroBatch, moved, part, row_slices
from gossamer.run.forward import run_forward
from gossamer.run.rank_stages import RankStages
from gossamer.run.step_algorithm import At
from gossamer.run.text_sampling import NoSample, Sampler
from gossamer.run.trainer_services import Sink
from gossamer.spec import records
from gossamer.sync import GradientReducer, OuterLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """The evaluation on one rank, which all ranks run at the same steps."""

    stages: RankStages
    feed: Feed
    validation: Batches | None
    sequences: int  # at most, in all
    sampler: Sampler | None
    replica: GradientReducer
    apart: OuterLoop
    shards_parameters: bool
    sink: Sink
    at: At

    @torch.no_grad()
    def evaluate(self, step: int) -> float | None:
        """Return the mean validation loss, over the same sequences on any number of ranks; None without such data.

        In local-update training it is the loss of the global parameters. It also samples text if the configuration asks
        for that. The buffers of the model are afterwards as training left them.
        """
        module, is_whole = self.stages.engine.module, not self.shards_parameters
        with self.apart.agreed(step), untouched(module, parameters=is_whole):
            loss = self._evaluate(step)
            if self.sampler is not None:
                self.at(step, "sample")
                try:
                    text = self.sampler.text(self.replica.gather)
                    self.sink(records.Sample(step=step, prompt=self.sampler.prompt, text=text))
                except NoSample as error:
                    said = f"no sample: {error}"
                    self.sink(records.Event(level="warning", message=said, step=step))
        return loss

    def _evaluate(self, step: int) -> float | None:
        if self.validation is None or len(self.validation) == 0:
            return None
        began = time.perf_counter()
        self.at(step, "evaluate")
        chosen = self.validation.first(self.sequences)
        plan, replica = self.feed.plan, self.feed.replica
        slices = [list(self._slices(chosen, r)) for r in range(plan.mesh.replica)]
        self.stages.engine.module.eval()
        # With sharded parameters all ranks run equally many forwards; those beyond a rank's share count nothing.
        idle = max(map(len, slices)) - len(slices[replica]) if self.shards_parameters else 0
        sums = self.replica.gather(self._evaluated(self.validation, slices[replica], idle, step))
        sums = sums.sum(0)
        loss = float(sums[0] / sums[1]) if sums[1] else math.nan
        text_bytes = self.validation.text_bytes(chosen)
        self.sink(
            records.Evaluation(
                step=step,
                loss=loss,
                bits_per_byte=float(sums[0]) / math.log(2) / text_bytes if text_bytes else None,
                sequences=len(chosen),
                seconds=time.perf_counter() - began,
            )
        )
        return loss

    def _slices(self, chosen: np.ndarray[Any, Any], replica: int) -> Iterator[np.ndarray[Any, Any]]:
        """Return the sequences that a replica evaluates, of those chosen, in slices as long as its micro-batches."""
        plan = self.feed.plan
        assert self.validation is not None
        side_by_side = chosen.reshape(-1, self.validation.together)
        mine = side_by_side[np.asarray(part(len(side_by_side), replica, plan.mesh.replica), dtype=np.int64)].reshape(-1)
        largest = max(side_by_side.shape[1], plan.rows[replica] // plan.microbatches[replica])
        return (mine[rows] for rows in row_slices(len(mine), largest))

    def _evaluated(
        self, split: Batches, chosen: Sequence[np.ndarray[Any, Any]], idle: int, step: int
    ) -> tuple[float, float]:
        """Return the sum of the losses over the valid labels of the chosen sequences, and the number of these labels.

        Both are zero on ranks without the last stage. `idle`: extra forwards to run, so that all ranks unshard equally
        often.
        """
        real = len(chosen)
        chosen = [*chosen, *[np.zeros(1, np.int64)] * idle]
        if not chosen:
            return 0.0, 0.0
        pipeline = self.stages.pipeline.forward_only(len(chosen))
        mine = sorted(pipeline.batches)
        batches: dict[int, MicroBatch] = {}
        for n in mine:
            self.at(step, "evaluate")
            batches[n] = MicroBatch(0, moved(split.batch(chosen[n]), self.stages.engine.device))
        weights = self.stages.weights(batches)
        means = run_forward(
            self.stages.pump, self.stages.pieces, pipeline, batches, moves=lambda: self.at(step, "evaluate")
        )
        known = {n: float(mean) for n, mean in means.items() if weights[n] and n < real}
        return sum(mean * weights[n] for n, mean in known.items()), sum(weights[n] for n in known)

    def estimate_s(self, pace_s: float) -> float:
        """Return an estimate of an evaluation's seconds: a forward takes a third of a step."""
        if self.validation is None:
            return 0.0
        sequences = len(self.validation.first(self.sequences))
        return pace_s * sequences / sum(self.feed.plan.rows) / 3
