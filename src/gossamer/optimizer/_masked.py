"""Optimizers around others that hold a part of the weights at 0: their masks, gradients and zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.optimizer import OptimizerState
from gossamer.optimizer._wrapper import Wrapper

KEPT = "kept"  # the slot of a mask: uint8, 1 where a weight is trained


class Masked(Wrapper):
    """An optimizer whose inner one sees no gradient of masked weights, and whose masked weights stay 0."""

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, KEPT)

    @property
    def sets_zeros(self) -> bool:
        return True

    @torch.no_grad()
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        self.inner.update(params, masked(grads, state), state, lr_scale=lr_scale, step=step)
        if lr_scale:  # inner rules that mix elements (Muon, LAMB) move masked weights
            clear(params, grads, state)
            self.remask(params, grads, state, update=step + 1)

    @torch.no_grad()
    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        self.inner.update_apart(params, masked(grads, state), state, lr_scale=lr_scale, step=step)
        if lr_scale:
            clear(params, grads, state)
            self.remask(params, grads, state, update=step + 1)

    def remask(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState, *, update: int
    ) -> None:
        """Change the masks after an update (the first one has the number 1); grads: unmasked. Most do not."""
        return None


@torch.no_grad()
def hold_at_zero(params: Mapping[str, Tensor], draw: StaticMaskDraw) -> None:
    """Set the masked weights of whole parameters to 0."""
    for name, param in params.items():
        shape = tuple(param.shape)
        if draw.covers(name, shape):
            param.detach().masked_fill_(~draw.kept(name, shape, param.device), 0)


def first_masks(
    state: OptimizerState,
    rows: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    starts: Mapping[str, int] | None,
    draw: StaticMaskDraw,
) -> OptimizerState:
    """Add these rows of the masks to `state`, and return it."""
    for name, own in rows.items():
        if draw.covers(name, shapes[name]):
            start = (starts or {}).get(name, 0)
            kept = draw.kept(name, shapes[name], own.device)
            state[name][KEPT] = kept[start : start + own.shape[0]].to(torch.uint8, copy=True)
    return state


def masked(grads: Mapping[str, Tensor], state: OptimizerState) -> dict[str, Tensor]:
    """Return the gradients with zeros where weights are masked."""
    return {
        name: torch.where(state[name][KEPT] != 0, grad, 0) if KEPT in state[name] else grad
        for name, grad in grads.items()
    }


def clear(tensors: Mapping[str, Tensor], names: Mapping[str, Tensor], state: OptimizerState) -> None:
    """Set the tensors `names` to 0 where weights are masked."""
    for name in names:
        if KEPT in state[name]:
            tensors[name].detach().masked_fill_(state[name][KEPT] == 0, 0)
