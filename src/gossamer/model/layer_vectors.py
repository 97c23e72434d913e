"""The vectors of linear layers in a step: their mean inputs, and the sums of the gradients of their outputs.

A forward hook sums the inputs and hangs on to the output; what it has summed counts once the output's gradient comes.
So a forward that is computed once more for the backward, in whatever way, counts once, and one without a backward
(an evaluation) never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True)
class VectorSums:
    """The float32 sums of one layer on one rank: inputs over positions, their number, gradients of the outputs."""

    input: Tensor
    output: Tensor
    positions: Tensor  # 0-dim
    is_kernel: bool

    def clear(self) -> None:
        for one in (self.input, self.output, self.positions):
            one.zero_()


@dataclass(slots=True)
class LayerHooks:
    """The hooks on the linear layers of a module, which sum only inside `open`. `sums`: by the name of the weight."""

    sums: Mapping[str, VectorSums]
    _handles: list[RemovableHandle] = field(default_factory=list)
    _is_open: bool = False

    @staticmethod
    def of(module: nn.Module, names: Collection[str]) -> LayerHooks:
        """Hook every linear layer and plain convolution of `module` whose weight is one of the parameters `names`."""
        known = {id(param): name for name, param in module.named_parameters()}
        layers = [(known.get(id(inner.weight), ""), inner) for inner in module.modules() if _is_linear(inner)]
        wanted = frozenset(names)
        chosen = [(name, inner) for name, inner in layers if name in wanted]
        found = LayerHooks({name: _zeros(inner.weight) for name, inner in chosen})
        found._handles = [inner.register_forward_hook(partial(found._seen, name)) for name, inner in chosen]
        return found

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Sum, from zero, what runs inside the context."""
        for one in self.sums.values():
            one.clear()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @torch.no_grad()
    def _seen(self, name: str, layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        if not self._is_open or not output.requires_grad:
            return
        inputs, positions = _summed_inputs(layer, given[0].detach(), output)
        back: Callable[[Tensor], None] = partial(self._arrived, name, inputs, positions)
        output.register_hook(back)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _arrived(self, name: str, inputs: Tensor, positions: int, gradient: Tensor) -> None:
        if self._is_open:
            one = self.sums[name]
            one.input += inputs
            one.positions += positions
            channels = gradient.dim() - (3 if one.is_kernel else 1)
            others = [dim for dim in range(gradient.dim()) if dim != channels]
            one.output += gradient.sum(others, dtype=torch.float32) if others else gradient


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return isinstance(layer, nn.Linear)


def _zeros(weight: Tensor | nn.Module) -> VectorSums:
    assert isinstance(weight, Tensor)
    made = partial(torch.zeros, dtype=torch.float32, device=weight.device)
    return VectorSums(made(weight[0].numel()), made(weight.shape[0]), made(()), weight.dim() > 2)


def _summed_inputs(layer: nn.Module, given: Tensor, output: Tensor) -> tuple[Tensor, int]:
    """Return the sum over positions of a layer's inputs, and the number of positions."""
    if not isinstance(layer, nn.Conv2d):
        return given.reshape(-1, given.shape[-1]).sum(0, dtype=torch.float32), given.numel() // given.shape[-1]
    images, out = (one if one.dim() == 4 else one[None] for one in (given, output))
    ones = torch.ones_like(out[:, :1], dtype=torch.float32)
    shape = (1, layer.in_channels, *layer.kernel_size)
    # The gradient of a kernel with one output, by a loss that adds its outputs up, is the sum of all patches.
    patches: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        images.float(), shape, ones, layer.stride, layer.padding, layer.dilation
    )
    return patches.flatten(), ones.numel()
