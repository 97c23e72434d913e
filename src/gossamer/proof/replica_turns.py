"""Replicas that take turns in one process: each continues from the buffers that its own micro-batches left, as each
data-parallel replica does in the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.model.split.constructor_state import digests_of
from gossamer.proof.sides import ModuleState
from gossamer.proof.trials import move, nudge
from gossamer.run.step_runner import ModelRuntime


@dataclass(slots=True, kw_only=True)
class ReplicaTurns:
    """One module that plays all replicas in turn; the buffers and other state are swapped at each turn.

    Later replicas get modules of their own only if the forward writes to its parameters. `joins`: the first turn of a
    later replica starts from the state the first one left, as if all were one process.
    """

    make: Callable[[], ModelRuntime]
    joins: bool = False
    changes: bool = False  # whether the first replica's first turn changed its state
    writes: bool = False  # whether it changed parameters
    counted: str = ""  # its first persistent buffer that changed
    engines: list[ModelRuntime] = field(default_factory=list)  # of the replicas, or one for all of them
    _begun: ModuleState | None = None
    _digests: Mapping[str, int] = field(default_factory=dict)
    _buffers: Mapping[str, int] = field(default_factory=dict)
    _worlds: dict[int, ModuleState] = field(default_factory=dict)  # saved state of the inactive replicas
    _at: int = 0

    def begin(self, replicas: int) -> nn.Module:
        """Build the first replica's module and return it; with several replicas, also snapshot its state."""
        self.engines.append(self.make())
        module = self.engines[0].module
        if replicas > 1:
            self._begun, self._digests, self._buffers = ModuleState.of(module), _digests(module), _of_buffers(module)
        return module

    def round(self, *, moves: bool, seed: int) -> None:
        """Start a round with cleared gradients; `moves`: add signs drawn from `seed` to the parameters first."""
        for engine in self.engines:
            if moves:
                move(dict(engine.module.named_parameters()), seed)
            engine.module.zero_grad(set_to_none=True)

    def nudge(self, compute: torch.dtype, seed: int) -> None:
        """Change the parameters below the last place of `compute`, so that half precision rounds differently."""
        for engine in self.engines:
            nudge(dict(engine.module.named_parameters()), seed, compute)

    def to(self, place: int) -> ModelRuntime:
        """Switch to the replica at index `place` and return its model runtime."""
        if place and not self._is_known(place):
            self._meet(place)
        if len(self.engines) > 1:
            return self.engines[place]
        engine = self.engines[0]
        if place != self._at:
            self._worlds[self._at] = ModuleState.of(engine.module)
            if place in self._worlds:
                self._worlds.pop(place).put_back()
            self._at = place
        return engine

    def gradient(self, name: str) -> Tensor | None:
        """Return a parameter's gradient summed over all replicas so far; None if no replica has one.

        The tensor may be the gradient itself, which later backward passes add to.
        """
        known = [g for g in (engine.module.get_parameter(name).grad for engine in self.engines) if g is not None]
        return sum(known[1:], known[0]) if known else None

    def _is_known(self, place: int) -> bool:
        return place in self._worlds or place == self._at or len(self.engines) > place

    def _meet(self, place: int) -> None:
        """Record how the first replica's state changed, and prepare the first turn of the replica at `place`."""
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
