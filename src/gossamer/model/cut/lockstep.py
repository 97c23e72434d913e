"""Lockstep: all stages in one process, one after the other, with real autograd. What a cut means, and its reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gossamer.model.cut.cuts import Cuts, parts_of
from gossamer.model.cut.flow import Flow, Value
from gossamer.model.cut.live import Live
from gossamer.model.cut.stage import Stage

Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]  # of a module on a batch


@dataclass(frozen=True, slots=True)
class Outcome:
    """`losses` of the micro-batches; `gradients` by canonical name, those of several stages added up."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]


def stages_of(module: nn.Module, flow: Flow, cuts: Cuts) -> list[Stage]:
    """Every stage of a copy of `module`."""
    return [Stage(copy.deepcopy(module), flow, part) for part in parts_of(module, flow, cuts)]


def run_lockstep(stages: Sequence[Stage], loss: Loss, batches: Sequence[Mapping[str, Any]]) -> Outcome:
    """Forward and backward of every batch through all stages; the gradients of the sum of the losses."""
    losses = []
    for batch in batches:
        lives: list[Live] = []
        tensors: dict[Value, Tensor] = {}
        for stage in stages:
            lives.append(stage.forward(partial(loss, stage.module, batch), tensors))
            tensors = lives[-1].sent
        losses.append(lives[-1].result.detach())
        gradients: dict[Value, Tensor] = {}
        for live in reversed(lives):
            gradients = live.backward(gradients, loss=live.result)
    return Outcome(losses, gradients_of(stages))


def gradients_of(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Gradients by canonical name, of parameters that have one; of a shared one the sum, last stage first."""
    found: dict[str, Tensor] = {}
    for stage in reversed(stages):
        for name, parameter in stage.parameters().items():
            if parameter.grad is not None:
                name = stage.names[name]
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found
