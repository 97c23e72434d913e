"""One data flow for every kind of batch: other shapes, other keys, another path through the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.split.buffer_owners import Keepers
from gossamer.model.split.dataflow import DataFlow
from gossamer.model.split.random_branches import RandomExtreme, check_way
from gossamer.model.split.split_points import SplitPoints, StageSpec, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names

Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
Known = dict[tuple[bool, Signature], tuple[DataFlow, tuple[StageSpec, ...]]]


def signature_of(batch: Mapping[str, Tensor]) -> Signature:
    """Return the signature of a batch, which its data flow may depend on: key, shape and dtype of each tensor."""
    return tuple((key, tuple(tensor.shape), tensor.dtype) for key, tensor in sorted(batch.items()))


@dataclass
class InputVariants:
    """The data flows and stage specifications of one split model, by kind of batch.

    Every rank traces on its own, and all get the same result.
    """

    module: nn.Module  # only traced: it needs no parameter memory
    run: Callable[[nn.Module, Mapping[str, Tensor]], Any]  # as in training: the loss of a batch
    cuts: SplitPoints
    units: tuple[str, ...] = ()  # none: those of `unit_names`
    known: Known = field(default_factory=dict, repr=False)

    def running(self, run: Callable[[nn.Module, Mapping[str, Tensor]], Any]) -> InputVariants:
        """Return variants of the same model and stages for another function `run`, such as an evaluation.

        Not for training.
        """
        trained = {kind: found for kind, found in self.known.items() if kind[0]}
        return InputVariants(self.module, run, self.cuts, self.units, trained)

    def of(self, batch: Mapping[str, Tensor], *, training: bool = True) -> tuple[DataFlow, tuple[StageSpec, ...]]:
        """Return the data flow and the stages of a batch. A new kind of batch costs a forward of the full model."""
        kind = (training, signature_of(batch))
        if kind not in self.known:
            flow = self.flow(batch, training=training)
            self.known[kind] = flow, stage_specs(self.module, flow, self.cuts, None if training else self._keepers())
        return self.known[kind]

    def flow(
        self, batch: Mapping[str, Tensor], *, training: bool = True, lot: RandomExtreme = RandomExtreme.ANY
    ) -> DataFlow:
        """Trace the model on a batch; the result does not depend on the split points. `lot`: see `RandomExtreme`."""
        self.module.train(training)
        return trace(
            self.module, lambda: self.run(self.module, batch), units=self.units or unit_names(self.module), lot=lot
        )

    def check_chance(self, batch: Mapping[str, Tensor], flow: DataFlow) -> None:
        """Raise BadInput if a random number decides which units a training batch calls, as far as a trace can show.

        Costs two more forwards, if the code between units may read random numbers.
        """
        for lot in (RandomExtreme.LOWEST, RandomExtreme.HIGHEST) if flow.by_chance else ():
            try:
                other = self.flow(batch, lot=lot)
            except Exception:  # the forward may not accept such extreme numbers
                continue
            check_way(self.module, flow, other)

    def know(self, batch: Mapping[str, Tensor], flow: DataFlow, parts: tuple[StageSpec, ...]) -> None:
        """Store the data flow and stages of a training batch.

        Raises BadInput if an evaluation would read a buffer in a stage that does not keep it.
        """
        self.known[True, signature_of(batch)] = flow, parts
        if any(change.loose for use in flow.buffers.values() for change in use.changes):
            self.of(batch, training=False)

    def _keepers(self) -> Keepers:
        """Return the owner stages of the buffers that training changes."""
        trained = next((found for (training, _), found in self.known.items() if training), None)
        if trained is None:
            return {}
        flow, parts = trained
        changed = (name for name, use in flow.buffers.items() if use.changes)
        return {name: frozenset(p.stage for p in parts if name in p.holds) for name in changed}
