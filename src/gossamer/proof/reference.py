"""One process: the whole model, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.proof.question import Question, Round, move, owned
from gossamer.proof.rows import Names, Table, digests_of, rows_of
from gossamer.proof.side import Side, world_kept
from gossamer.proof.tracks import Tracks
from gossamer.run.batches import MicroBatch
from gossamer.run.stage import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Side):
    """The whole model in this process. `shake`: the loss is multiplied with it before the backward and gradients are
    divided by it, and `threads` of them compute: another rounding of the same numbers.
    """

    engine: Callable[[], Engine]  # makes the model anew
    names: Names
    pulse: Callable[[], None]  # called after every piece of work, so that those who wait know
    shake: float = 1.0
    threads: int = 0  # 0: as many as there are
    tracks: Tracks | None = None  # where its forwards are looked at
    units: tuple[str, ...] = ()  # then: those of the model

    def answer(self, question: Question) -> Table:
        with _threads(self.threads):
            engine = self.engine()
            if self.tracks is not None:
                self.tracks.watch(engine, self.units)
            self.pulse()
            with world_kept(engine.module):
                return self._answer(engine, question)

    def _answer(self, engine: Engine, question: Question) -> Table:
        module = engine.module
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        initial = digests_of({**parameters, **buffers}, self.names.values)
        gradients, kept, losses = [], [], []
        for one in question.rounds:
            if one.moves:
                move(parameters, question.seed)
            module.zero_grad(set_to_none=True)
            found, after = self._round(replace(engine, precision=one.precision), one, question.seed)
            by = self.shake * one.scale
            mine = {n: None if p.grad is None else p.grad.div_(by) for n, p in parameters.items() if p.requires_grad}
            gradients.append(rows_of(mine, self.names.trained, question.seed))
            kept.append(after)
            losses.append(torch.tensor(found, dtype=torch.float64))
        return Table(
            initial=initial, gradients=torch.stack(gradients), buffers=torch.stack(kept), losses=torch.stack(losses)
        )

    def _round(self, engine: Engine, one: Round, seed: int) -> tuple[list[float], Tensor]:
        """Losses of all micro-batches, and the buffers as the first replica has them."""
        losses: list[float] = []
        after: Tensor | None = None
        for replica, pieces in one.pieces.items():
            for number, piece in pieces.items():
                losses.append(self._micro(engine, one, piece, one.labels[replica][number]))
                self.pulse()
            if after is None:
                after = rows_of(_now(engine), self.names.buffers, seed)
        assert after is not None, "some replica takes part"
        return losses, after

    def _micro(self, engine: Engine, one: Round, piece: MicroBatch, labels: float) -> float:
        if self.tracks is not None:
            self.tracks.begin(one.number, piece.key)
        loss = engine.loss(owned(piece.rows, engine.device), step=one.number, key=piece.key)
        if self.tracks is not None:
            self.tracks.end()
        part = labels / one.total if one.total else 0.0
        scaled = loss * (part * one.scale * self.shake) if part else torch.nan_to_num(loss) * 0.0
        if scaled.requires_grad:
            with engine.randomness.at(one.number, piece.key):
                scaled.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


def _now(engine: Engine) -> Mapping[str, Tensor]:
    return dict(engine.module.named_buffers())


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
