"""The single-process side of a proof: one rank runs the unsharded model, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gossamer.proof.entries import Picked
from gossamer.proof.fingerprints import FingerprintTable, TensorNames, digests_of, rows_of
from gossamer.proof.replica_turns import ReplicaTurns
from gossamer.proof.sides import ProofSide, world_kept
from gossamer.proof.tensor_log import TensorLog
from gossamer.proof.trials import Trial, TrialSet, owned
from gossamer.run.batches import MicroBatch
from gossamer.run.step_runner import ModelRuntime


@dataclass(slots=True)
class ProofWork:
    """The number of model builds and micro-batches that this process ran for a proof."""

    builds: int = 0
    microbatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneProcess(ProofSide):
    """The unsharded model in this process; replicas take turns, each with the buffers that its own micro-batches left.

    `shake` multiplies the loss before the backward pass and divides the gradients; with another number of `threads`,
    the same numbers are rounded differently. In half precision, where threads change little, parameters are also
    changed below their last place. `joins`: the second replica starts with the state of the first.
    """

    engine: Callable[[], ModelRuntime]  # builds the model
    names: TensorNames
    pulse: Callable[[], Callable[[], None]]  # returns the keepalive to call after every build and micro-batch
    shake: float = 1.0
    threads: int = 0  # 0: torch's current number
    joins: bool = False
    tracks: TensorLog | None = None  # logs the forward values, if given
    units: tuple[str, ...] = ()  # the model's units, for `tracks`
    picked: Picked | None = None  # keeps one gradient, if given
    tally: ProofWork = field(default_factory=ProofWork)

    def answer(self, question: TrialSet) -> FingerprintTable:
        """Run all rounds in this process and return their fingerprint table."""
        with _threads(self.threads), ExitStack() as stack:
            pulse = self.pulse()
            turns = ReplicaTurns(make=lambda: self._made(stack, pulse), joins=self.joins)
            module = turns.begin(len(question.replicas))
            initial = digests_of(_values(module), self.names.values)
            rounds = []
            for one in question.rounds:
                turns.round(moves=one.moves, seed=question.seed)
                if self.shake != 1 and one.is_half_precision:
                    turns.nudge(one.precision.compute, question.seed)
                rounds.append(self._round(turns, one, question.seed, pulse))
            firsts, gradients, buffers, losses = map(torch.stack, zip(*rounds, strict=True))
            return FingerprintTable(
                initial=initial,
                gradients=gradients,
                buffers=buffers,
                losses=losses,
                first=firsts,
                keeps=torch.tensor(
                    [turns.changes or turns.writes, turns.writes, self._place_of(turns.counted)], dtype=torch.float64
                ),
            )

    def _place_of(self, buffer: str) -> int:
        """Return the 1-based index of a buffer name, 0 if it is no buffer."""
        return self.names.buffers.index(buffer) + 1 if buffer in self.names.buffers else 0

    def _made(self, stack: ExitStack, pulse: Callable[[], None]) -> ModelRuntime:
        engine = self.engine()
        self.tally.builds += 1
        if self.tracks is not None:
            self.tracks.watch(engine, self.units)
        stack.enter_context(world_kept(engine.module))
        pulse()
        return engine

    def _round(self, turns: ReplicaTurns, one: Trial, seed: int, pulse: Callable[[], None]) -> tuple[Tensor, ...]:
        """Run one round and return four tensors: gradient rows of the first replica and of all replicas, the first
        replica's buffer rows, and the losses of all micro-batches.
        """
        losses: list[float] = []
        first = after = torch.empty(0)
        for place, (replica, pieces) in enumerate(one.pieces.items()):
            engine = replace(turns.to(place), precision=one.precision)
            for number, piece in pieces.items():
                losses.append(self._micro(engine, one, piece, one.labels[replica][number]))
                self.tally.microbatches += 1
                pulse()
            if not place:
                first = self._rows(turns, one, seed)
                after = rows_of(dict(engine.module.named_buffers()), self.names.buffers, seed)
        summed = self._rows(turns, one, seed) if len(one.pieces) > 1 else first
        return first, summed, after, torch.tensor(losses, dtype=torch.float64)

    def _micro(self, engine: ModelRuntime, one: Trial, piece: MicroBatch, labels: float) -> float:
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

    def _rows(self, turns: ReplicaTurns, one: Trial, seed: int) -> Tensor:
        """Return the fingerprint rows of the gradients accumulated so far; zeros where there is none."""
        rows = []
        for name in self.names.trained:
            found = turns.gradient(name)
            known = None if found is None else found / (self.shake * one.scale)
            if self.picked is not None:
                self.picked.keep(name, one.number, known)
            rows.append(rows_of({name: known}, [name], seed))
        return torch.cat(rows) if rows else rows_of({}, [], seed)


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
