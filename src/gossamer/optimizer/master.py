"""Master: parameters in a half type follow a float32 copy of themselves, which the inner rule moves.

Paper: Micikevicius et al., ICLR 2018, arXiv:1710.03740, section 3.1.
Equations: inner rule on (W, float32 g, float32 slots) ; w <- round(W)
Symbols: w parameter (bf16, fp16), W its float32 copy `master` (state), both of one shape.
State:   that of the inner rule in float32, and W: 4 bytes each per element. Nothing more for float32 parameters, which
the inner rule moves themselves: there this changes no bit.
Good when: the model is held in bf16, where a step of less than 1/256 of a parameter would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._wrapper import Wrapper
from gossamer.optimizer.adamw import AdamW

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Master(Wrapper):
    """An optimizer with float32 master weights, which `inner` updates in place of parameters in half types."""

    inner: Optimizer = field(default_factory=AdamW)

    @property
    def is_plain(self) -> bool:
        return self.inner.is_plain

    def average(self, params: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        found = self.inner.average(_wide(params, params, state), state)
        return {name: one.to(params[name].dtype) for name, one in found.items()}

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.inner.slots, "master")

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        wide = {name: param.detach().float() if param.dtype in HALF else param for name, param in rows.items()}
        state = self.inner.init_rows(wide, shapes, starts)
        for name, param in rows.items():
            if param.dtype in HALF:
                state[name]["master"] = wide[name].contiguous()
        return state

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
        wide = _wide(params, grads, state)
        self.inner.update(wide, grads, state, lr_scale=lr_scale, step=step)
        _round(params, wide)

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
        wide = _wide(params, grads, state)
        self.inner.update_apart(wide, grads, state, lr_scale=lr_scale, step=step)
        _round(params, wide)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        self.inner.meet(_wide(params, moved, state), moved, state, rates=rates)


def _wide(params: Mapping[str, Tensor], names: Iterable[str], state: OptimizerState) -> dict[str, Tensor]:
    return {name: state[name].get("master", params[name]) for name in names}


def _round(params: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> None:
    for name, param in wide.items():
        if params[name].dtype in HALF:
            params[name].copy_(param)
