"""The labels that a model's own loss is the mean over: all but the first of each sequence, or the first one too.

Causal models shift: the first label of a sequence has nothing before it that could predict it, so it does not count.
Encoder-decoders and masked language models do not shift. Which of both a model does is measured before training: its
loss with no label but the first of each sequence, against its loss without any label. Where both are the same (0, nan,
or what terms besides the labels give), the first label does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.loss import IGNORE, Loss
from gossamer.loss.next_token import NextToken
from gossamer.model.side_effects import evaluating, gradless, untouched
from gossamer.run.batches import MicroBatch, RankBatch, moved
from gossamer.run.engine import pieces_of, pipeline_of
from gossamer.run.forward import run_forward
from gossamer.run.parts import Parts
from gossamer.run.step_runner import ModelRuntime
from gossamer.spec.errors import BadInput

_SHIFTS, _ALL, _UNKNOWN, _ELSEWHERE = 0.0, 1.0, 2.0, -1.0  # what a rank has measured
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AllLabels(Loss):
    """A model's own loss, which is the mean over all labels and not over those after a shift. `inner`: for its key."""

    by_token: ClassVar[bool] = True

    inner: NextToken

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return self.inner(output, batch)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (self.inner.labels_in(batch) != IGNORE).sum()

    def predictions(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.inner.logits_in(output, batch), self.inner.labels_in(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCount:
    """The measurement on one rank; all ranks make it together. `tell`: takes a warning for the user."""

    parts: Parts
    engine: ModelRuntime
    pump: CommThread
    at: Callable[[int, str], None]
    tell: Callable[[str], None]

    def measured(self) -> ModelRuntime:
        """Return the runtime with a loss that counts the labels which the model's own loss counts."""
        loss, caller = self.engine.objective, self.engine.caller
        if not isinstance(loss, NextToken) or not (caller.takes_all or loss.labels in caller.takes):
            return self.engine
        found, why = self._found(loss)
        row = gathered(self.pump.channel, [found]).flatten().tolist()
        if _ALL in row:
            return replace(self.engine, objective=AllLabels(inner=loss))
        if _SHIFTS not in row and _UNKNOWN in row:
            self.tell(
                "whether the model's loss counts the first label of a sequence could not be measured"
                f"{f' ({why})' if why else ''}: micro-batches count by their labels after a shift, as for causal models"
            )
        return self.engine

    def _found(self, loss: NextToken) -> tuple[float, str]:
        """Return what this rank has measured, and why it could not."""
        module, train = self.engine.module, self.parts.train
        replica, _ = self.parts.plan.axes.place(self.pump.channel.rank)
        plan, cut = self.parts.plan, self.parts.cut
        count = 1 if cut is None else max(1, plan.rows[replica] // plan.microbatches[replica])  # as an evaluation has
        with untouched(module), evaluating(module), torch.no_grad(), _eager():
            rows = moved(train.batch(np.arange(min(count, len(train)))), self.engine.device)
            labels = rows.get(loss.labels)
            if labels is None or labels.ndim != 2 or labels.is_floating_point():
                return _UNKNOWN, "" if labels is None else f"labels {tuple(labels.shape)} of {labels.dtype}"
            known = labels[labels != IGNORE]
            none = torch.full_like(labels, IGNORE)
            first = none.clone()
            first[:, 0] = known[0] if len(known) else 0
            run = self._alone if cut is None else self._in_stages
            try:
                return _judged(*(run({**rows, loss.labels: one}) for one in (first, none))), ""
            except BadInput as error:  # in stages: of the trace, which all ranks make alike
                return _UNKNOWN, str(error)
            except Exception as error:
                if cut is not None:
                    raise
                return _UNKNOWN, f"{type(error).__name__}: {error}"

    def _alone(self, rows: RankBatch) -> float:
        return float(gradless(lambda: self.engine.loss_of_copies(rows, step=0, key=0)))

    def _in_stages(self, rows: RankBatch) -> float | None:
        """Return the loss, None on ranks without the last stage."""
        channel = self.pump.channel
        pipeline = pipeline_of(self.parts, channel.rank, channel.levels).forward_only(1)
        batches = {number: MicroBatch(0, dict(rows)) for number in sorted(pipeline.batches)}
        pieces = pieces_of(self.parts, self.engine)
        found = run_forward(self.pump, pieces, pipeline, batches, moves=lambda: self.at(0, "compute"))
        return float(next(iter(found.values()))) if found else None


def _judged(first: float | None, none: float | None) -> float:
    """Return what the losses with the first labels alone and without any say."""
    if first is None or none is None:
        return _ELSEWHERE
    if not math.isfinite(first):
        return _SHIFTS  # the mean of nothing
    return _ALL if not abs(first - none) <= _ROUNDING * abs(first) else _SHIFTS


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs as it is written: nothing is compiled for two forwards."""
    if not hasattr(torch.compiler, "set_stance"):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return, no-untyped-call]
