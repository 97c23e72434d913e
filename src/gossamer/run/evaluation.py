"""The evaluation of a run: its validation loss, and text that the model continues."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gossamer.model.side_effects import untouched
from gossamer.run.batches import Batches, Feed, MicroBatch, moved, part, row_slices
from gossamer.run.evaluation_point import EvaluationPoint
from gossamer.run.forward import run_forward
from gossamer.run.rank_stages import RankStages
from gossamer.run.step_algorithm import At
from gossamer.run.step_runner import ModelPart
from gossamer.run.text_sampling import NoSample, Sampler
from gossamer.run.trainer_services import Sink
from gossamer.run.validation_set import ValidationSet
from gossamer.spec import records
from gossamer.spec.watched_figure import LOSS, Figures
from gossamer.sync import GradientReducer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """The evaluation on one rank, which all ranks run at the same steps.

    `pieces`: the stages of this rank, whose last one returns the loss and the `metrics` (`MeasuredLoss`).
    """

    stages: RankStages
    pieces: Mapping[int, ModelPart]
    metrics: tuple[str, ...]  # their names
    feed: Feed
    validation: Mapping[str, ValidationSet]  # those that hold a sequence
    sequences: int  # of each set, at most
    sampler: Sampler | None
    replica: GradientReducer
    point: EvaluationPoint
    shards_parameters: bool
    sink: Sink
    at: At

    @torch.no_grad()
    def evaluate(self, step: int) -> Figures:
        """Return the mean loss and the metrics of every validation set, over the same sequences on any number of ranks.

        They are the same on all ranks. They are those of the evaluation point (`EvaluationPoint`). It also samples
        text if the configuration asks for that. The buffers of the model are afterwards as training left them.
        """
        module, is_whole = self.stages.engine.module, not self.shards_parameters
        found: dict[tuple[str, str], float] = {}
        with self.point.after(step), untouched(module, parameters=is_whole):
            for name, one in self.validation.items():
                found.update({(name, figure): value for figure, value in self._evaluate(step, name, one).items()})
            if self.sampler is not None:
                self.at(step, "sample")
                try:
                    text = self.sampler.text(self.replica.gather)
                    self.sink(records.Sample(step=step, prompt=self.sampler.prompt, text=text))
                except NoSample as error:
                    said = f"no sample: {error}"
                    self.sink(records.Event(level="warning", message=said, step=step))
        return found

    def _evaluate(self, step: int, name: str, one: ValidationSet) -> dict[str, float]:
        """Evaluate one set, write its record, and return its figures by name."""
        began = time.perf_counter()
        self.at(step, "evaluate")
        chosen = one.batches.first(self.sequences)
        plan, replica = self.feed.plan, self.feed.replica
        slices = [list(self._slices(chosen, r, one.batches.together)) for r in range(plan.mesh.replica)]
        self.stages.engine.module.eval()
        # With sharded parameters all ranks run equally many forwards; those beyond a rank's share count nothing.
        idle = max(map(len, slices)) - len(slices[replica]) if self.shards_parameters else 0
        mine = self._evaluated(one.batches, slices[replica], idle, step)
        self.point.states.finish()
        sums = self.replica.gather(mine).sum(0).tolist()
        loss = sums[0] / sums[1] if sums[1] else math.nan
        metrics = {
            metric: total / count if count else math.nan
            for metric, total, count in zip(self.metrics, sums[2::2], sums[3::2], strict=True)
        }
        text_bytes = one.batches.text_bytes(chosen)
        self.sink(
            records.Evaluation(
                step=step,
                loss=loss,
                bits_per_byte=sums[0] / math.log(2) / text_bytes if text_bytes else None,
                sequences=len(chosen),
                seconds=time.perf_counter() - began,
                name=name,
                metrics=metrics,
            )
        )
        return {LOSS: loss, **metrics}

    def _slices(self, chosen: np.ndarray[Any, Any], replica: int, together: int) -> Iterator[np.ndarray[Any, Any]]:
        """Return the chosen sequences that a replica evaluates, in slices as long as its micro-batches.

        `together`: so many neighbors stay in one slice.
        """
        plan = self.feed.plan
        side_by_side = chosen.reshape(-1, together)
        mine = side_by_side[np.asarray(part(len(side_by_side), replica, plan.mesh.replica), dtype=np.int64)].reshape(-1)
        largest = max(side_by_side.shape[1], plan.rows[replica] // plan.microbatches[replica])
        return (mine[rows] for rows in row_slices(len(mine), largest))

    def _evaluated(
        self, split: Batches, chosen: Sequence[np.ndarray[Any, Any]], idle: int, step: int
    ) -> tuple[float, ...]:
        """Return the sum of the losses over the valid labels of the chosen sequences, and the number of these labels,
        then the sum and the count of every metric.

        All are zero on ranks without the last stage. `idle`: extra forwards to run, so that all ranks unshard equally
        often.
        """
        nothing = (0.0,) * (2 + 2 * len(self.metrics))
        real = len(chosen)
        chosen = [*chosen, *[np.zeros(1, np.int64)] * idle]
        if not chosen:
            return nothing
        pipeline = self.stages.pipeline.forward_only(len(chosen))
        mine = sorted(pipeline.batches)
        batches: dict[int, MicroBatch] = {}
        for n in mine:
            self.at(step, "evaluate")
            batches[n] = MicroBatch(0, moved(split.batch(chosen[n]), self.stages.engine.device))
        weights = self.stages.weights(batches)
        found = run_forward(self.stages.pump, self.pieces, pipeline, batches, moves=lambda: self.at(step, "evaluate"))
        known = {n: one.double().reshape(-1).cpu() for n, one in found.items() if weights[n] and n < real}
        if not known:
            return nothing
        loss = sum(float(one[0]) * weights[n] for n, one in known.items())
        measured = torch.stack([one[1:] for one in known.values()]).sum(0).tolist()
        return loss, sum(weights[n] for n in known), *measured

    def estimate_s(self, pace_s: float) -> float:
        """Return an estimate of an evaluation's seconds: a forward takes a third of a step."""
        sequences = sum(len(one.batches.first(self.sequences)) for one in self.validation.values())
        return pace_s * sequences / sum(self.feed.plan.rows) / 3
