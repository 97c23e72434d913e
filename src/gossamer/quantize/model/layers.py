"""Quantize the linear layers of a model in place, one after the other, with the moments of the inputs they get.

Layers are found by structure: every nn.Linear and Conv1D of transformers whose weight is its own, but for the output
embedding. Embeddings, heads, norms and biases stay. Moments are gathered unit of the model by unit, in the order in
which a forward calls its layers (`gossamer.model.unit_walk`), as many layers at a time as fit `moments_bytes` (at least
one): a later unit sees what the quantized ones before it compute, and a model of any size needs the moments of one
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.quantize_base import linear_names, put
from gossamer.model.quantized_linear import QuantizedLinear, weight_of
from gossamer.model.side_effects import evaluating
from gossamer.model.unit_walk import Forward, UnitLayers, listening, run_to, unit_layers, walked_units
from gossamer.quantize import Quantizer
from gossamer.spec.errors import BadInput, bad_input

MOMENTS_BYTES = 1 << 30

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """A layer that was quantized: the shape of its weight, the bytes of its integers and scales, and errors.

    `weight_error`: |W - W'| / |W|; `output_error`: |X (W - W')^T| / |X W^T| over the calibration inputs X, None without
    any (Frobenius norms). `zeros_filled`: weights that were 0, as in a pruned model, and are not any more. `said`: what
    is worth telling.
    """

    name: str
    shape: tuple[int, int]
    nbytes: int
    weight_error: float
    output_error: float | None
    zeros_filled: int
    said: str

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that a weight takes, its share of the scales counted."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """What `quantize_layers` did. `kept`: the matrices that stay as they are, by name."""

    layers: tuple[QuantizedLayer, ...]
    kept: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """Return the bits that a weight of a quantized layer takes, the scales counted."""
        weights = sum(one.shape[0] * one.shape[1] for one in self.layers)
        return 8 * sum(one.nbytes for one in self.layers) / weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Batches of text and how the model is called with one. Equal batches give equal moments."""

    caller: ForwardAdapter
    batches: Sequence[Mapping[str, Tensor]]

    def forwards(self, module: nn.Module) -> list[Forward]:
        """Return the forwards of the batches."""
        return [partial(self.caller, module, batch) for batch in self.batches]


@torch.no_grad()
def quantize_layers(
    module: nn.Module,
    quantizer: Quantizer,
    calibration: Calibration | None = None,
    *,
    moments_bytes: int = MOMENTS_BYTES,
    progress: Progress = lambda done, total: None,
) -> QuantizeReport:
    """Replace the linear layers of `module` by quantized ones, in place; say what that did to each.

    calibration: inputs of the model; a quantizer that needs none takes them too, to say the errors of outputs. The
    module is run in evaluation mode. Raises BadInput, with the name of the layer: a weight that is not finite, no
    calibration where the quantizer needs it, no layer to quantize; earlier layers are quantized then.
    """
    chosen = linear_names(module)
    _check(module, chosen, quantizer, calibration)
    modes = {name: module.get_submodule(name).training for name in chosen}
    made: dict[str, QuantizedLayer] = {}
    forwards = [] if calibration is None else calibration.forwards(module)
    with evaluating(module):
        for group in _groups(module, chosen, forwards, moments_bytes):
            moments = _moments(module, group, forwards)
            for name in group.names:
                made[name] = _quantize(module, name, quantizer, moments.pop(name, None))
                progress(len(made), len(chosen))
    for name, mode in modes.items():
        module.get_submodule(name).train(mode)
    kept = tuple(n for n, p in module.named_parameters() if p.ndim > 1)
    return QuantizeReport(layers=tuple(made[name] for name in chosen), kept=kept)


def _told_of_others(module: nn.Module) -> str:
    """Return what linear layers of classes of their own are there: what these compute is not known."""
    own = sorted({type(one).__name__ for one in module.modules() if isinstance(one, nn.Linear)} - {"Linear"})
    return f", whose {' and '.join(own)} may compute otherwise" if own else ""


def _check(module: nn.Module, chosen: Sequence[str], quantizer: Quantizer, calibration: Calibration | None) -> None:
    if not chosen:
        raise bad_input(
            wanted="a model with linear layers (torch.nn.Linear, or transformers' Conv1D) to quantize",
            got=f"none in a {type(module).__name__}{_told_of_others(module)}",
            do="leave it as it is",
        )
    if quantizer.needs_inputs and not (calibration and calibration.batches):
        raise bad_input(
            wanted="calibration text, from whose activations the integers are chosen",
            got="none",
            do="name text files, or use --by round_to_nearest",
            key="data",
        )
    for name in chosen:
        if not bool(weight_of(module.get_submodule(name)).isfinite().all()):
            raise bad_input(
                wanted=f"finite numbers in {name}.weight",
                got="some that are infinite or not a number",
                do="take an earlier checkpoint (--checkpoint), or look for the step that broke it",
            )


def _quantize(module: nn.Module, name: str, quantizer: Quantizer, moments: Tensor | None) -> QuantizedLayer:
    linear = module.get_submodule(name)
    weight = weight_of(linear)
    try:
        encoded = quantizer.encode(weight, moments)
        layer = QuantizedLinear.of(linear, quantizer.format, encoded.blocks)
    except BadInput as error:
        raise BadInput(f"{name}: {error.message}", key=error.key) from None
    exact, made = weight.double(), layer.weight.double()
    apart = exact - made
    put(module, name, layer)
    return QuantizedLayer(
        name=name,
        shape=(layer.out_features, layer.in_features),
        nbytes=encoded.blocks.nbytes,
        weight_error=float(apart.norm() / exact.norm().clamp_min(1e-300)),
        output_error=None if moments is None else _relative(apart, exact, moments),
        zeros_filled=int(((exact == 0) & (made != 0)).sum()),
        said=encoded.said,
    )


def _relative(apart: Tensor, exact: Tensor, moments: Tensor) -> float:
    """Return |X D^T| / |X W^T| from the moments of X."""
    error, whole = (float(((one @ moments) * one).sum().clamp_min(0)) for one in (apart, exact))
    return (error / whole) ** 0.5 if whole else 0.0


def _groups(
    module: nn.Module, chosen: Sequence[str], forwards: Sequence[Forward], moments_bytes: int
) -> Iterator[UnitLayers]:
    """Yield the layers of one unit at a time, and of a unit as many as fit."""
    for layers in unit_layers(module, chosen, forwards, walked_units(module)):
        group: list[str] = []
        held = 0
        for name in layers.names:
            size = 8 * weight_of(module.get_submodule(name)).shape[1] ** 2
            if group and held + size > moments_bytes:
                yield replace(layers, names=tuple(group))
                group, held = [], 0
            group.append(name)
            held += size
        yield replace(layers, names=tuple(group))


def _moments(module: nn.Module, group: UnitLayers, forwards: Sequence[Forward]) -> dict[str, Tensor]:
    """Return sum x x^T of each of the layers that are called, over all batches."""
    found: dict[str, Tensor] = {}

    def take(name: str, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        squares = (flat.t() @ flat).double()
        found[name] = found[name].add_(squares) if name in found else squares

    with listening(module, group.names, take):
        run_to(module, group, forwards)
    return found
