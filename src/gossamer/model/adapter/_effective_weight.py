"""A layer of peft whose adapter changes the weight that the layer multiplies with, and whose backward makes it again.

    y = x V^T + b,   V = f(W, B A),   dP = f'(x^T dy) with P = B A,   dB = dP A^T,   dA = B^T dP,   dx = dy V

For the backward pass a layer keeps x, A and B. V, of W's size, is made in the forward and again in the backward pass,
and kept in neither; W and the mask are there anyway. Merging writes V itself, so a merged layer multiplies with the
same numbers. The module imports peft, and is imported when an adapter first needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gossamer.model.adapter._peft import ADAPTER
from gossamer.model.quantized_linear import is_conv1d
from gossamer.spec.errors import bad_input


class WeightChange(ABC):
    """How V follows from W, (out, in), the product P = B A, and a mask of the weights that are kept."""

    @abstractmethod
    def weight(self, w: Tensor, p: Tensor, mask: Tensor | None) -> Tensor:
        """Return V, in the type of W. Weights that are not kept stay as they are, bit for bit."""

    @abstractmethod
    def slope(self, dv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        """Return the gradient of P from that of V."""


@dataclass(frozen=True, slots=True)
class AddMasked(WeightChange):
    """V = W + scale P where the mask keeps a weight, else W."""

    scale: float

    def weight(self, w: Tensor, p: Tensor, mask: Tensor | None) -> Tensor:
        moved = w + (self.scale * p).to(w.dtype)
        return moved if mask is None else torch.where(mask, moved, w)

    def slope(self, dv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        scaled = self.scale * dv
        return scaled if mask is None else scaled.masked_fill_(~mask, 0.0)


@dataclass(frozen=True, slots=True)
class Scale(WeightChange):
    """V = W * P; a weight of 0 stays one, whatever P is."""

    def weight(self, w: Tensor, p: Tensor, mask: Tensor | None) -> Tensor:
        return torch.where(w == 0, w, (w * p).to(w.dtype))

    def slope(self, dv: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
        return dv * w.to(dv.dtype)


class EffectiveLinear(LoraLinear):  # type: ignore[misc]
    """peft's linear layer with another use of A and B. `mask`: the weights that are kept, as the layer holds them."""

    mask: Tensor | None
    change: WeightChange

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, change: WeightChange, **given: Any) -> None:
        super().__init__(base_layer, adapter_name, **given)
        self.change = change
        self.fan_in_fan_out = is_conv1d(base_layer)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return x V^T + b, in the type of x, or that of autocast."""
        if self.disable_adapters or self.merged:
            found: Tensor = self.base_layer(x, *args, **kwargs)
            return found
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        base: Any = self.get_base_layer()
        if base.weight.requires_grad:
            raise bad_input(
                wanted="frozen weights under an adapter that keeps zeros",
                got=f"a trained one of shape {tuple(base.weight.shape)}",
                do="leave it out of model.unfreeze",
                key="model.unfreeze",
            )
        y: Tensor = _Product.apply(x.to(dtype), *self._factors(), self._held())  # type: ignore[no-untyped-call]
        bias = getattr(base, "bias", None)
        return y if bias is None else y + bias.to(dtype)

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
        """Write V into the weight. Raises ValueError where it is not finite, as peft does."""
        held, base = self._held(), self.get_base_layer()
        found = held.effective(*self._factors())
        if not bool(found.isfinite().all()):
            raise ValueError("numbers that are not finite")
        base.weight.data = (found.t() if held.is_turned else found).contiguous()
        self.merged_adapters.append(ADAPTER)

    def _factors(self) -> tuple[Tensor, Tensor]:
        layer: Any = self
        return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight

    def _held(self) -> _Held:
        base: Any = self.get_base_layer()
        return _Held(base.weight, self.mask, self.change, bool(self.fan_in_fan_out))


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """What a layer has anyway: the parameter itself, whose values are read when they are needed, and its mask."""

    parameter: nn.Parameter
    mask: Tensor | None
    change: WeightChange
    is_turned: bool

    def weight(self) -> Tensor:
        found = self.parameter.detach()
        return found.t() if self.is_turned else found

    def kept(self) -> Tensor | None:
        return self.mask.t() if self.mask is not None and self.is_turned else self.mask

    def effective(self, a: Tensor, b: Tensor) -> Tensor:
        return self.change.weight(self.weight(), b @ a, self.kept())


class _Product(torch.autograd.Function):
    """x V^T; saves x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, held: _Held) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.held = held
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x, held.effective(a, b).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, a, b = ctx.saved_tensors
        held: _Held = ctx.held
        needs_x, needs_a, needs_b, _ = ctx.needs_input_grad
        dx = da = db = None
        with torch.autocast(x.device.type, enabled=False):
            if needs_x:
                dx = dy @ held.effective(a, b).to(dy.dtype)
            if needs_a or needs_b:
                dv = (dy.flatten(0, -2).t() @ x.flatten(0, -2)).to(a.dtype)
                dp = held.change.slope(dv, held.weight(), held.kept())
                da, db = b.t() @ dp, dp @ a.t()
        return dx, da, db, None
