"""A linear layer that is held at several bit widths at once, each with a low-rank adapter of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gossamer.model.bit_widths import BitWidths, Widths
from gossamer.model.quantize_base import put
from gossamer.model.quantized import Blocks
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import QuantizedLinear
from gossamer.model.step_dependent import StepDependent


class QfaLinear(nn.Module, StepDependent):
    """y = W_b x + scale B_b A_b x of the width b that it is set to; W_b are frozen integers, A_b and B_b are trained.

    In a training step the width is that of the step; else the one that was set, at first the largest. A layer with one
    width is a part of a subnet, and computes what the whole layer does at that width bit for bit. `blocks`: the
    integers by width; those of a width that has none there are the weights rounded to nearest.
    """

    def __init__(
        self,
        linear: nn.Module,
        widths: tuple[int, ...],
        *,
        group: int,
        rank: int,
        scale: float,
        blocks: Mapping[int, Blocks] | None = None,
    ) -> None:
        super().__init__()
        self.widths, self.scale, self.rank = widths, scale, rank
        self.layers: BitWidths | None = None  # of the whole supernet
        self.place = 0
        self.width = self.step_width = widths[-1]
        for bits in widths:
            held = QuantizedLinear.of(linear, Packed(bits=bits, group=group), (blocks or {}).get(bits))
            self.add_module(f"held_{bits}", held)
        self.in_features, self.out_features = held.in_features, held.out_features
        for bits in widths:
            for slot, into, out in (("A", self.in_features, rank), ("B", rank, self.out_features)):
                made = nn.Linear(into, out, bias=False, dtype=held.dtype, device=held.weight_blocks.device)
                self.add_module(f"lora_{slot}_{bits}", made)
                if slot == "B":
                    nn.init.zeros_(made.weight)
        self.train(linear.training)

    def begin_step(self, seed: int, step: int) -> None:
        if self.layers is not None:
            self.step_width = self.layers.at(seed, step)[self.place]

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out_features) of an input (..., in_features)."""
        bits = self.step_width if self.training else self.width
        down, up = self.adapter(bits)
        found: Tensor = self.held(bits)(input) + up(down(input)) * self.scale
        return found

    def held(self, bits: int) -> QuantizedLinear:
        """Return the frozen integers of a width."""
        found = self.get_submodule(f"held_{bits}")
        assert isinstance(found, QuantizedLinear)
        return found

    def adapter(self, bits: int) -> tuple[nn.Module, nn.Module]:
        """Return A and B of a width."""
        return self.get_submodule(f"lora_A_{bits}"), self.get_submodule(f"lora_B_{bits}")

    def slots(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors by the name of what holds them."""
        for bits in self.widths:
            for slot in ("A", "B"):
                name = f"lora_{slot}_{bits}"
                weight = self.get_submodule(name).weight
                assert isinstance(weight, Tensor)
                yield name, weight

    def nbytes(self, bits: int) -> int:
        """Return the bytes of the layer at a width: integers, scales, adapter, bias."""
        inside = [self.held(bits), *self.adapter(bits)]
        return sum(one.nbytes for part in inside for one in (*part.parameters(), *part.buffers()))

    def keep(self, bits: int) -> None:
        """Drop all widths but one."""
        for other in self.widths:
            if other != bits:
                for name in (f"held_{other}", f"lora_A_{other}", f"lora_B_{other}"):
                    delattr(self, name)
        self.widths, self.layers = (bits,), None
        self.width = self.step_width = bits

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """Return the layer that this one stands for, with the weight W_b + scale B_b A_b of the width that is set."""
        held, (down, up) = self.held(self.width), self.adapter(self.width)
        return held.plain(held.weight + self.scale * (up.weight @ down.weight)).train(self.training)  # type: ignore[operator]


def qfa_layers(module: nn.Module) -> dict[str, QfaLinear]:
    """Return the layers of several widths by name, in the order of the model."""
    return {name: one for name, one in module.named_modules() if isinstance(one, QfaLinear)}


def bit_widths(module: nn.Module) -> BitWidths:
    """Return the widths that the layers of a supernet may have. Raises AssertionError for a module without any."""
    layers = qfa_layers(module)
    assert layers, "no supernet"
    found = next(iter(layers.values())).layers
    assert found is not None, "a subnet, not a supernet"
    return found


def set_widths(module: nn.Module, chosen: Widths) -> None:
    """Set the widths of all layers, for evaluation."""
    for layer, bits in zip(qfa_layers(module).values(), chosen, strict=True):
        layer.width = bits


def extract(module: nn.Module, chosen: Widths) -> None:
    """Make a supernet the subnet of these widths, in place: what the others held is dropped."""
    for layer, bits in zip(qfa_layers(module).values(), chosen, strict=True):
        layer.keep(bits)


def merge_widths(module: nn.Module) -> None:
    """Replace all layers by linear ones of the widths that are set, in place."""
    for name, layer in qfa_layers(module).items():
        put(module, name, layer.merged())


def nbytes_at(module: nn.Module, chosen: Widths) -> int:
    """Return the bytes of the subnet: those of its layers, and of all other parameters and persistent buffers once."""
    layers = qfa_layers(module)
    inside = tuple(f"{name}." for name in layers)
    rest: Mapping[int, Tensor] = {
        id(one): one for name, one in module.state_dict(keep_vars=True).items() if not name.startswith(inside)
    }
    own = sum(layer.nbytes(bits) for layer, bits in zip(layers.values(), chosen, strict=True))
    return own + sum(one.nbytes for one in rest.values())
