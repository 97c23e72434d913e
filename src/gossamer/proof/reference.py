"""One process: the whole model, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gossamer.proof.question import Question, Round, move, owned
from gossamer.proof.rows import Names, Table, digests_of, rows_of
from gossamer.proof.side import Side, world_kept
from gossamer.proof.tracks import Tracks
from gossamer.run.batches import MicroBatch
from gossamer.run.stage import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone(Side):
    """The whole model in this process. `shake`: the loss is multiplied with it before the backward and gradients are
    divided by it, and `threads` of them compute: another rounding of the same numbers. `apart`: every replica has a
    model of its own, with the state that its own micro-batches leave.
    """

    engine: Callable[[], Engine]  # makes the model anew
    names: Names
    pulse: Callable[[], Callable[[], None]]  # gives what is called after every piece of work: those who wait know
    shake: float = 1.0
    threads: int = 0  # 0: as many as there are
    apart: bool = False
    tracks: Tracks | None = None  # where its forwards are looked at
    units: tuple[str, ...] = ()  # then: those of the model

    def answer(self, question: Question) -> Table:
        with _threads(self.threads), ExitStack() as stack:
            pulse = self.pulse()
            engines = [self._made(stack, pulse) for _ in (question.replicas if self.apart else (0,))]
            initial = digests_of(_values(engines[0].module), self.names.values)
            gradients, buffers, losses = [], [], []
            for one in question.rounds:
                for engine in engines:
                    if one.moves:
                        move(dict(engine.module.named_parameters()), question.seed)
                    engine.module.zero_grad(set_to_none=True)
                found, after = self._round(engines, one, question.seed, pulse)
                gradients.append(rows_of(self._sums(engines, one), self.names.trained, question.seed))
                buffers.append(after)
                losses.append(torch.tensor(found, dtype=torch.float64))
            return Table(
                initial=initial,
                gradients=torch.stack(gradients),
                buffers=torch.stack(buffers),
                losses=torch.stack(losses),
            )

    def _made(self, stack: ExitStack, pulse: Callable[[], None]) -> Engine:
        engine = self.engine()
        if self.tracks is not None:
            self.tracks.watch(engine, self.units)
        stack.enter_context(world_kept(engine.module))
        pulse()
        return engine

    def _round(
        self, engines: Sequence[Engine], one: Round, seed: int, pulse: Callable[[], None]
    ) -> tuple[list[float], Tensor]:
        """Losses of all micro-batches, and the buffers as the first replica has them."""
        losses: list[float] = []
        after: Tensor | None = None
        for place, (replica, pieces) in enumerate(one.pieces.items()):
            engine = replace(engines[min(place, len(engines) - 1)], precision=one.precision)
            for number, piece in pieces.items():
                losses.append(self._micro(engine, one, piece, one.labels[replica][number]))
                pulse()
            if after is None:
                after = rows_of(dict(engine.module.named_buffers()), self.names.buffers, seed)
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

    def _sums(self, engines: Sequence[Engine], one: Round) -> dict[str, Tensor | None]:
        """Of all models, by name; None where there is no gradient."""
        found: dict[str, Tensor | None] = {}
        for name in self.names.trained:
            parts = [engine.module.get_parameter(name).grad for engine in engines]
            known = [part for part in parts if part is not None]
            found[name] = sum(known[1:], known[0]).div_(self.shake * one.scale) if known else None
        return found


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
