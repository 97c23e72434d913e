"""A log of forward values: what every unit returns and every stage receives, by micro-batch.

The values are logged only after both sides were found to differ, to name the first forward value that differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.pytree import flatten
from gossamer.ops.fingerprint import projected
from gossamer.pipeline.p2p import StageBoundary
from gossamer.proof.verdict import EPS, Parting, Spot
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.staged_model import StagePart
from gossamer.run.step_runner import ModelPart, ModelRuntime

_PLACES = 4
_COARSE = 2**-6  # relative tolerance of a value in half precision
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class TensorLog:
    """The log of one rank's forward values, as a few projections of each tensor.

    `owned`: names of the calls whose output is computed here; None: all of them.
    """

    owned: frozenset[str] | None = None
    found: dict[str, list[float] | str] = field(default_factory=dict)
    _at: tuple[int, int] | None = None
    _turns: dict[str, int] = field(default_factory=dict)

    def watch(self, engine: ModelRuntime, units: Sequence[str]) -> None:
        """Log the outputs of `units` from now on. The module must not be used for anything else afterwards."""
        for name in units:
            unit = engine.module.get_submodule(name)
            unit.forward = _LoggedForward(self, name, unit.forward)  # type: ignore[method-assign]

    def begin(self, round: int, key: int) -> None:
        """Start logging the forward pass of micro-batch `key` in a round."""
        self._at = (round, key)
        self._turns.clear()

    def end(self) -> None:
        """Stop logging: units that are recomputed in a backward pass are not logged."""
        self._at = None

    def gave(self, unit: str, output: Any) -> None:
        """Log the output of one call of a unit."""
        if self._at is None:
            return
        turn = self._turns.get(unit, 0)
        self._turns[unit] = turn + 1
        call = f"{unit}@{turn}" if turn else unit
        if self.owned is None or call in self.owned:
            self._note(call, -1, output)

    def received(self, calls: Mapping[CallOutput, str], received: Mapping[CallOutput, Tensor], stage: int) -> None:
        """Log the tensors that a stage received over its link."""
        for value, tensor in received.items():
            if value in calls and self._at is not None:
                self.found[_text(Spot(*self._at, calls[value], value.place, stage))] = _said(tensor)

    def _note(self, call: str, into: int, output: Any) -> None:
        assert self._at is not None
        for place, leaf in enumerate(flatten(output)[0]):
            self.found[_text(Spot(*self._at, call, place, into))] = _said(leaf)


class _LoggedForward:
    """A unit's forward function that also logs its output."""

    def __init__(self, tracks: TensorLog, name: str, real: Callable[..., Any]) -> None:
        self.tracks, self.name, self.real = tracks, name, real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.real(*args, **kwargs)
        self.tracks.gave(self.name, output)
        return output


@dataclass(frozen=True, slots=True)
class LossRecorder(ModelPart):
    """A stage of the model that records its losses by micro-batch."""

    inner: ModelPart
    losses: dict[int, float]

    @property
    def engine(self) -> ModelRuntime:  # type: ignore[override]
        """Return the model runtime of the stage."""
        return self.inner.engine

    def boundary(self, rows: RankBatch) -> StageBoundary:
        """Return the stage boundary of a batch."""
        return self.inner.boundary(rows)

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        """Run the stage's forward pass and record its loss, if this stage computes one."""
        live = self.inner.forward(piece, step, received, keep_graph=keep_graph)
        if isinstance(live.result, Tensor):
            self.losses[piece.key] = float(live.result.detach())
        return live


@dataclass(frozen=True, slots=True)
class LoggedStage(ModelPart):
    """A stage of the model that logs its received tensors and unit outputs."""

    inner: ModelPart
    tracks: TensorLog
    round: int

    @property
    def engine(self) -> ModelRuntime:  # type: ignore[override]
        """Return the model runtime of the stage."""
        return self.inner.engine

    def boundary(self, rows: RankBatch) -> StageBoundary:
        """Return the stage boundary of a batch."""
        return self.inner.boundary(rows)

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        """Run the stage's forward pass with logging on."""
        self.tracks.begin(self.round, piece.key)
        if isinstance(self.inner, StagePart):
            flow, _ = self.inner.ways.of(piece.rows)
            calls = {v: flow.calls[v.call].name for v in received if 0 <= v.place < len(flow.calls[v.call].leaves)}
            self.tracks.received(calls, received, self.inner.stage.part.stage)
        try:
            return self.inner.forward(piece, step, received, keep_graph=keep_graph)
        finally:
            self.tracks.end()


def parting(
    alone: Mapping[str, list[float] | str], divided: Sequence[Mapping[str, list[float] | str]], exact: Sequence[bool]
) -> Parting | None:
    """Return the first logged value, in the order of one process, that differs on some rank; None if none does.

    None means that the difference is computed outside of units, or in the backward pass. `exact`: by round, whether it
    computes in float32.
    """
    order = {text: place for place, text in enumerate(alone)}  # in one process's order
    found: list[tuple[int, bool, Parting]] = []
    for rank, mine in enumerate(divided):
        for text, got in mine.items():
            spot = Spot(*json.loads(text))
            twin = _text(replace(spot, into=-1))
            if twin in alone and _differs(got, alone[twin], EPS if exact[spot.round] else _COARSE):
                said = Parting(spot=spot, rank=rank, got=_words(got), wanted=_words(alone[twin]))
                found.append((order[twin], spot.into >= 0, said))
    return min(found, key=lambda one: one[:2])[2] if found else None


def _text(spot: Spot) -> str:
    return json.dumps(astuple(spot))


def _said(leaf: Any) -> list[float] | str:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
    flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).detach().reshape(-1)
    if not flat.numel():
        return f"empty {tuple(leaf.shape)}"
    row = projected([flat.double()], 0, width=_PLACES) / math.sqrt(flat.numel())
    return [float(x) for x in row.tolist()]


def _differs(got: list[float] | str, wanted: list[float] | str, limit: float) -> bool:
    if isinstance(got, str) or isinstance(wanted, str):
        return got != wanted
    size = max(abs(wanted[0]), 1e-30)
    return not all(abs(a - b) <= limit * size or a == b for a, b in zip(got, wanted, strict=True))


def _words(value: list[float] | str) -> str:
    return value if isinstance(value, str) else f"root mean square {value[0]:.6g}"
