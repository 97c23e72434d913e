"""The parallel side of a proof: this rank's stage of the model, with its schedule, links and gradient exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gossamer.comm.comm_thread import CommThread
from gossamer.exchange.dense import Dense
from gossamer.model.split.input_variants import InputVariants
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.proof.entries import Picked
from gossamer.proof.fingerprints import FingerprintTable, TensorNames, digests_of, rows_of
from gossamer.proof.sides import ProofSide, world_kept
from gossamer.proof.tensor_log import LoggedStage, LossRecorder, TensorLog
from gossamer.proof.trials import Trial, TrialSet, move, owned
from gossamer.run.checkpoint import trainable
from gossamer.run.engine import engine_of, holdings_of, pieces_of, pipeline_of
from gossamer.run.parts import Parts
from gossamer.run.staged_model import Forward, StagedModel
from gossamer.run.step_algorithm import At, Gradients
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.task import Task
from gossamer.sync import GradientReducer, StepContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedSide(ProofSide):
    """The proof side of the parallel layout: runs this rank's stages and averages gradients as in training.

    All ranks call `answer` together. Raises PeerLost.
    """

    parts: Callable[[], Parts]  # builds this rank's stages under the plan of the proof
    names: TensorNames
    pump: CommThread
    at: At
    tracks: TensorLog | None = None  # logs the forward values, if given
    picked: Picked | None = None  # keeps one gradient, if given

    def answer(self, question: TrialSet) -> FingerprintTable:
        """Run all rounds on this rank's stages and return its fingerprint table. All ranks call it together."""
        parts = self.parts()
        engine = engine_of(parts)
        if self.tracks is not None:
            if parts.cut is not None:
                self.tracks.owned = _owned(parts.cut)
            self.tracks.watch(engine, parts.units)
        with world_kept(parts.module):
            return self._answer(parts, engine, question)

    def _answer(self, parts: Parts, engine: ModelRuntime, question: TrialSet) -> FingerprintTable:
        rank, levels = self.pump.channel.rank, self.pump.channel.levels
        mine = parts.plan.axes.place(rank)[0]
        pipeline, holdings = pipeline_of(parts, rank, levels), holdings_of(parts, rank, levels)
        tied, held = TiedWeights.of(rank, levels, holdings), _held(parts)
        initial = digests_of(held, self.names.values)
        trained = trainable(parts.module)
        replica = GradientReducer(trained, Dense(), self.pump, bucket_bytes=parts.plan.bucket_bytes, holdings=holdings)
        gradients, buffers, losses = [], [], []
        try:
            for one in question.rounds:
                if one.moves:
                    move({n: t for n, t in held.items() if isinstance(t, nn.Parameter)}, question.seed)
                pieces = pieces_of(_computing(parts, one), replace(engine, precision=one.precision))
                if self.tracks is not None:
                    pieces = {stage: LoggedStage(piece, self.tracks, one.number) for stage, piece in pieces.items()}
                heard: dict[int, float] = {}
                pieces = {stage: LossRecorder(piece, heard) for stage, piece in pieces.items()}
                descent = Gradients(
                    pieces=pieces, pipeline=pipeline, tied=tied, pump=self.pump, replica=replica, at=self.at
                )
                _play(descent, one, mine, question, engine.device)
                losses.append(_losses(one, heard))
                found = replica.gradients()
                if self.picked is not None:
                    for name, gradient in found.items():
                        self.picked.keep(name, one.number, gradient)
                gradients.append(rows_of(found, self.names.trained, question.seed))
                is_counted = mine == question.replicas[0] and not _is_shared(parts, rank)
                counted = _held(parts) if is_counted else {}  # collected again: a forward may assign a buffer
                buffers.append(rows_of(counted, self.names.buffers, question.seed))
                replica.reject()
        finally:
            replica.close()
        return replace(
            FingerprintTable.blank(self.names, len(question.rounds), question.microbatches),
            initial=initial,
            gradients=torch.stack(gradients),
            buffers=torch.stack(buffers),
            losses=torch.stack(losses),
        )


def _play(descent: Gradients, one: Trial, mine: int, question: TrialSet, device: torch.device) -> None:
    """Run one round as a training step, up to and including the averaging of gradients."""
    numbered = {n: replace(p, rows=owned(p.rows, device)) for n, p in one.pieces.get(mine, {}).items()}
    here = {n: p for n, p in numbered.items() if n in descent.pipeline.batches}
    weights = {n: one.labels[mine][n] for n in here}
    window = StepContext(
        one.number, question.seed, 1.0, sum(weights.values()), one.scale, descent.pipeline.together, level="all"
    )
    descent.replica.begin(window)
    if here:
        descent.attempt(Task(window=window, pieces=here, weights=weights))
    else:
        descent.replica.open(window)
        descent.reduce(one.number)


def _losses(one: Trial, heard: Mapping[int, float]) -> Tensor:
    """Return the losses of a round, (micro-batches,) float64.

    The value is nan if another rank computes the loss or it has no valid labels, and inf if it is not finite.
    """
    found = []
    for replica, pieces in one.pieces.items():
        for number, piece in pieces.items():
            known = heard.get(piece.key, math.nan) if one.labels[replica][number] else math.nan
            found.append(known if math.isfinite(known) or piece.key not in heard else math.inf)
    return torch.tensor(found, dtype=torch.float64)


def _is_shared(parts: Parts, rank: int) -> bool:
    """Return whether another rank runs some micro-batches of this rank's stages, and so updates some buffers."""
    return any(len(group) > 1 for group in parts.plan.stage_ranks if rank in group)


def _owned(cut: StagedModel) -> frozenset[str]:
    """Return the names of the calls that belong to this rank's stages."""
    return frozenset(
        call.name
        for stage in cut.stages.values()
        for number, call in enumerate(stage.flow.calls)
        if stage.part.owns(number)
    )


def _held(parts: Parts) -> dict[str, Tensor]:
    """Return this rank's parameters and buffers by name."""
    module = parts.module
    found: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return found if parts.cut is None else {n: t for n, t in found.items() if n in parts.cut.holds}


def _computing(parts: Parts, one: Trial) -> Parts:
    """Return `parts` whose traced data flow has the precision of a round, which sets the dtypes at stage boundaries."""
    cut = parts.cut
    if cut is None or one.precision.name == parts.config.train.precision:
        return parts
    run = Forward(parts.objective, one.precision, parts.device)
    return replace(parts, cut=replace(cut, ways=InputVariants(cut.ways.module, run, cut.ways.cuts, cut.ways.units)))
