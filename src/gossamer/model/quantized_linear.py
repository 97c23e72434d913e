"""A frozen linear layer whose weight is held in blocks, and decoded for every product."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.quantized import Blocks, WeightFormat
from gossamer.spec.errors import bad_input

BUFFERS = ("weight_blocks", "weight_scales")


class QuantizedLinear(nn.Module):
    """A linear layer y = x W^T + b with a frozen W of (out_features, in_features) in blocks of `format`.

    W is decoded in the type of x (that of autocast inside of it) in every forward and again in every backward pass, and
    kept in neither; backward gives the gradient of x and, where it is trained, of b. The blocks are buffers:
    `weight_blocks`, and `weight_scales` where the format has scales beside them. They keep their types when the module
    is cast. `dtype` is the type of `weight`, and of b.
    """

    weight_blocks: Tensor
    weight_scales: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: WeightFormat,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        is_turned: bool = False,
    ) -> None:
        """Make a layer without values: `fill` or `load_state_dict` sets them. Raises BadInput for a width it lacks.

        is_turned: the layer stands for a Conv1D of transformers, whose weight is (in_features, out_features).
        """
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format, self.dtype, self.is_turned = format, dtype, is_turned
        blocks = format.empty(out_features, in_features, device)
        self.register_buffer("weight_blocks", blocks.codes)
        self.register_buffer("weight_scales", blocks.scales)
        empty = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty, requires_grad=False))

    @classmethod
    def of(cls, linear: nn.Module, format: WeightFormat, blocks: Blocks | None = None) -> QuantizedLinear:
        """Return a layer that stands for `linear`: an nn.Linear, or a Conv1D of transformers, whose weight it turns.

        blocks: what its weight has become; None: `format` encodes it. The bias is the same parameter, frozen. Raises
        BadInput for values that the format cannot hold.
        """
        weight = weight_of(linear)
        rows, columns = weight.shape
        nowhere = torch.device("meta")
        made = cls(columns, rows, format, dtype=weight.dtype, device=nowhere, is_turned=is_conv1d(linear))
        made._set(format.encode(weight) if blocks is None else blocks)
        bias = getattr(linear, "bias", None)
        if bias is not None:
            made.bias = bias.requires_grad_(False)
        return made.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The weight (out_features, in_features), decoded in `dtype`: new memory at every access."""
        return self._blocks.decode(self.dtype)

    def weight_as_given(self) -> Tensor:
        """Return the decoded weight in the layout of the layer that this one stands for: turned for a Conv1D."""
        return self.weight.t() if self.is_turned else self.weight

    def plain(self, weight: Tensor) -> nn.Module:
        """Return the layer that this one stands for, an nn.Linear or a Conv1D, with the bias of this one and `weight`,
        (out_features, in_features), in the layout of that layer.
        """
        with torch.device("meta"):  # nothing is drawn
            if self.is_turned:
                made = _conv1d()(self.out_features, self.in_features)
            else:
                made = nn.Linear(self.in_features, self.out_features, bias=False)
        held = weight.t().contiguous() if self.is_turned else weight
        made.weight, made.bias = nn.Parameter(held.detach().to(self.dtype)), self.bias
        found: nn.Module = made.train(self.training)
        return found

    def fill(self, weight: Tensor) -> None:
        """Encode `weight` (out_features, in_features) into the blocks. Raises BadInput for another shape."""
        if weight.shape != (self.out_features, self.in_features):
            raise bad_input(
                wanted=f"a weight of shape {(self.out_features, self.in_features)}",
                got=str(tuple(weight.shape)),
                do="give the config that the weights were saved with",
            )
        self._set(self.format.encode(weight))

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features) of an input (..., in_features), in its type, or that of autocast.

        The argument is called as that of nn.Linear.
        """
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        y: Tensor = _Product.apply(input.to(dtype), self._blocks, False)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes and the format, for the module's representation."""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}, {self.format}"

    @property
    def _blocks(self) -> _Held:
        return _Held(self.format, Blocks(self.weight_blocks, self.weight_scales), self.in_features)

    def _set(self, blocks: Blocks) -> None:
        if blocks.scales is not None and not blocks.scales.is_meta and not bool(blocks.scales.isfinite().all()):
            raise bad_input(
                wanted=f"a weight whose blocks have a scale in {blocks.scales.dtype}",
                got="values that are not finite, or too large",
                do="leave this layer as it is, or use bf16",
            )
        self.weight_blocks, self.weight_scales = blocks.codes, blocks.scales

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        """Move or cast the module: the blocks move, and keep their types, without which they mean nothing."""
        before = self.weight_blocks, self.weight_scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_blocks = _moved(before[0], self.weight_blocks)
        if before[1] is not None and self.weight_scales is not None:
            self.weight_scales = _moved(before[1], self.weight_scales)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight_blocks.device)).dtype
        return self


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized layers in `module` by name."""
    return {name: one for name, one in module.named_modules() if isinstance(one, QuantizedLinear)}


def _moved(before: Tensor, after: Tensor) -> Tensor:
    return after if after.dtype == before.dtype else before.to(after.device)


def weight_of(linear: nn.Module) -> Tensor:
    """Return the weight (out, in) of an nn.Linear, or of a Conv1D of transformers, which stores it transposed.

    Raises BadInput for another module.
    """
    weight = getattr(linear, "weight", None)
    if type(linear) is nn.Linear and isinstance(weight, Tensor):
        return weight.detach()
    if is_conv1d(linear) and isinstance(weight, Tensor):
        return weight.detach().t()
    raise bad_input(
        wanted="an nn.Linear, or a Conv1D of transformers, to quantize",
        got=f"a {type(linear).__module__}.{type(linear).__qualname__}",
        do="leave it out",
    )


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is the Conv1D of transformers, a linear layer; imports it only if it may be."""
    if type(module).__name__ != "Conv1D" or not type(module).__module__.startswith("transformers."):
        return False
    return type(module) is _conv1d()


def _conv1d() -> Any:
    return importlib.import_module("transformers.pytorch_utils").Conv1D


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The blocks of a layer at the time of a product, and what decodes them."""

    format: WeightFormat
    blocks: Blocks
    columns: int

    def decode(self, dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            return self.format.decoded(self.blocks, self.columns, dtype)


class _Product(torch.autograd.Function):
    """x W^T, or x W where it is transposed; its gradient is the other one. Nothing is saved but references to blocks.

    They are attributes of the context, not saved tensors: hooks on these would copy blocks that never change.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: _Held, is_transposed: bool) -> Tensor:
        ctx.held, ctx.is_transposed = held, is_transposed
        weight = held.decode(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return x @ weight if is_transposed else nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        return _Product.apply(grads[0], ctx.held, not ctx.is_transposed), None, None  # type: ignore[no-untyped-call]
