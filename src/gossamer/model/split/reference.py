"""Lockstep reference: all stages in one process, one after the other, with real autograd.

It defines what a split model computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from gossamer.model.split.dataflow import CallOutput, DataFlow
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.split_points import SplitPoints, stage_specs
from gossamer.model.split.stage import StageModule

LossFunction = Callable[[nn.Module, Mapping[str, Any]], Tensor]  # of a module on a batch


@dataclass(frozen=True, slots=True)
class LockstepResult:
    """The losses of the micro-batches, and the gradients by canonical name, summed over the stages."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]


def stages_of(module: nn.Module, flow: DataFlow, cuts: SplitPoints) -> list[StageModule]:
    """Build every stage, each from a copy of `module`."""
    return [StageModule(copy.deepcopy(module), flow, part) for part in stage_specs(module, flow, cuts)]


def run_lockstep(
    stages: Sequence[StageModule], loss: LossFunction, batches: Sequence[Mapping[str, Any]]
) -> LockstepResult:
    """Run forward and backward of every batch through all stages. Return the losses and the gradients of their sum."""
    losses = []
    for batch in batches:
        lives: list[InFlight] = []
        tensors: dict[CallOutput, Tensor] = {}
        for stage in stages:
            lives.append(stage.forward(partial(loss, stage.module, batch), tensors))
            tensors = lives[-1].sent
        losses.append(lives[-1].result.detach())
        gradients: dict[CallOutput, Tensor] = {}
        for live in reversed(lives):
            gradients = live.backward(gradients, loss=live.result)
    return LockstepResult(losses, gradients_of(stages))


def gradients_of(stages: Sequence[StageModule]) -> dict[str, Tensor]:
    """Return gradients by canonical name, for parameters that have one; sum those of a shared one, last stage first."""
    found: dict[str, Tensor] = {}
    for stage in reversed(stages):
        for name, parameter in stage.parameters().items():
            if parameter.grad is not None:
                name = stage.names[name]
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found
