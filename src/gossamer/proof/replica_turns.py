"""Replicas that take turns in one process: each goes on with the state that its own micro-batches have left, as in the
layout, where every replica keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.model.split.constructor_state import digests_of
from gossamer.proof.sides import ProofRanks
from gossamer.proof.trials import move, nudge
from gossamer.run.step_runner import ModelRuntime


@dataclass(slots=True, kw_only=True)
class ReplicaTurns:
    """One module, whose state is exchanged when another one's turn comes. Only where its forward writes to its
    parameters the later ones have modules of their own. `joins`: a later replica's first turn begins with what the
    first has left, as if all were one process.
    """

    make: Callable[[], ModelRuntime]
    joins: bool = False
    changes: bool = False  # whether the state of the first is another after its first turn
    writes: bool = False  # whether its parameters are
    counted: str = ""  # the first of its buffers that is another one and that a checkpoint keeps
    engines: list[ModelRuntime] = field(default_factory=list)  # of the replicas, or one for all of them
    _begun: ProofRanks | None = None
    _digests: Mapping[str, int] = field(default_factory=dict)
    _buffers: Mapping[str, int] = field(default_factory=dict)
    _worlds: dict[int, ProofRanks] = field(default_factory=dict)  # of those whose turn it is not
    _at: int = 0

    def begin(self, replicas: int) -> nn.Module:
        """The module as it is made."""
        self.engines.append(self.make())
        module = self.engines[0].module
        if replicas > 1:
            self._begun, self._digests, self._buffers = ProofRanks.of(module), _digests(module), _of_buffers(module)
        return module

    def round(self, *, moves: bool, seed: int) -> None:
        """A round begins: its gradients are of its own."""
        for engine in self.engines:
            if moves:
                move(dict(engine.module.named_parameters()), seed)
            engine.module.zero_grad(set_to_none=True)

    def nudge(self, compute: torch.dtype, seed: int) -> None:
        """From now on half precision rounds otherwise."""
        for engine in self.engines:
            nudge(dict(engine.module.named_parameters()), seed, compute)

    def to(self, place: int) -> ModelRuntime:
        """It is this replica's turn."""
        if place and not self._is_known(place):
            self._meet(place)
        if len(self.engines) > 1:
            return self.engines[place]
        engine = self.engines[0]
        if place != self._at:
            self._worlds[self._at] = ProofRanks.of(engine.module)
            if place in self._worlds:
                self._worlds.pop(place).put_back()
            self._at = place
        return engine

    def gradient(self, name: str) -> Tensor | None:
        """Of all replicas so far; None where none has one. It may be what is added to."""
        known = [g for g in (engine.module.get_parameter(name).grad for engine in self.engines) if g is not None]
        return sum(known[1:], known[0]) if known else None

    def _is_known(self, place: int) -> bool:
        return place in self._worlds or place == self._at or len(self.engines) > place

    def _meet(self, place: int) -> None:
        """Its first turn: it begins as the first did."""
        assert self._begun is not None, "there are replicas"
        module = self.engines[0].module
        self.changes |= self._begun.is_another()
        self.writes |= _digests(module) != self._digests
        found = _of_buffers(module)
        self.counted = self.counted or next((n for n, d in found.items() if self._buffers.get(n) != d), "")
        if self.writes:
            self.engines.append(self.make())
        elif not self.joins:
            self._worlds[place] = self._begun


def _digests(module: nn.Module) -> dict[str, int]:
    return digests_of(module, frozenset(name for name, _ in module.named_parameters()))


def _of_buffers(module: nn.Module) -> dict[str, int]:
    kept = set(module.state_dict(keep_vars=True))
    return digests_of(module, frozenset(name for name, _ in module.named_buffers() if name in kept))
