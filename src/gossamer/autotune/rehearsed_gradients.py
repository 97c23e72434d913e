"""What a rehearsed step's gradients say of a choice: the parts in use, and what each candidate would lose of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.exchange import Exchange
from gossamer.ops.topk_indices import used_blocks
from gossamer.plan.exchange import Candidate
from gossamer.recipe import ParameterRules
from gossamer.run.profile_step import StepProfile
from gossamer.spec.errors import BadInput

_SMALL = 1 << 12  # numbers of a gradient that is measured with others
_BLOCK = 32  # numbers of a gradient of which all are zero, or one is in use


def occupied_by(pump: CommThread, rehearsal: StepProfile) -> tuple[dict[str, float], frozenset[str]]:
    """Return by parameter the part of its gradient, in blocks, that is not zero on some rank in some micro-batch: at
    most the sum of these. Return also the parameters of which nothing is known, that count as whole.

    Those have a gradient, and it is zero on all ranks: as behind weights that begin at zero (an adapter's, a head's),
    which have moved after one step. A parameter on which no rank's loss depends is not among them. All ranks must call
    it.
    """
    names = list(rehearsal.gradients)
    mine = [rehearsal.microbatches * _part_in_use(g) for g in rehearsal.gradients.values()]
    mine += [float(name not in rehearsal.absent) for name in names]
    total = gathered(pump.channel, mine).sum(0).clamp(max=1.0).tolist()
    parts, present = dict(zip(names, total, strict=False)), dict(zip(names, total[len(names) :], strict=True))
    idle = frozenset(name for name in names if present[name] and not parts[name])
    return parts | dict.fromkeys(idle, 1.0), idle


def with_stand_ins(gradients: Mapping[str, Tensor], idle: frozenset[str]) -> dict[str, Tensor]:
    """Return the gradients; for each of `idle` Gaussian numbers, whose mean square is that of all other ones."""
    known = [g for name, g in gradients.items() if name not in idle]
    square, numel = sum(float(g.double().square().sum()) for g in known), sum(g.numel() for g in known)
    scale, rng = math.sqrt(square / numel) if square else 1.0, torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(g.shape, generator=rng, dtype=torch.float32) * scale).to(g) if name in idle else g
        for name, g in gradients.items()
    }


def _part_in_use(gradient: Tensor) -> float:
    return float(used_blocks(gradient.flatten(), _BLOCK).float().mean()) if gradient.numel() else 1.0


def lost_of(candidate: Candidate, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |x - kept|^2 of every gradient by itself; nan for one that the candidate cannot serve.

    Small ones share buckets, as they do in a run: of thousands each by itself would take longer than all the rest.
    """
    one, found = ParameterRules.single(candidate.loses_as), dict.fromkeys(gradients, 0.0)
    if one.traits.lossless:
        return found
    for some in _together(gradients):
        found |= {name: error**2 for name, error in _errors(one, some).items()}
    return found


def _errors(exchange: Exchange, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the errors of gradients in one bucket; where that cannot be served, those of each by itself, or nan."""
    try:
        return exchange_methods.errors_of(exchange, gradients)
    except BadInput:
        if len(gradients) == 1:
            return dict.fromkeys(gradients, math.nan)
    return {n: error for name, one in gradients.items() for n, error in _errors(exchange, {name: one}).items()}


def _together(gradients: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the gradients in groups: a small one with others of its type, every other one by itself."""
    small = dict[tuple[torch.dtype, torch.device], dict[str, Tensor]]()
    found = list[dict[str, Tensor]]()
    for name, gradient in gradients.items():
        if gradient.numel() > _SMALL:
            found.append({name: gradient})
        else:
            small.setdefault((gradient.dtype, gradient.device), {})[name] = gradient
    return [*found, *small.values()]
