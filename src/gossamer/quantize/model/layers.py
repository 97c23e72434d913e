"""Quantize the linear layers of a model in place, one after the other, with the moments of the inputs they get.

Layers are found by structure: every nn.Linear and Conv1D of transformers whose weight is its own, but for the output
embedding. Embeddings, heads, norms and biases stay. Moments are gathered block of the model by block, in the order in
which a forward calls its layers, as many layers at a time as fit `moments_bytes` (at least one): a later block sees
what the quantized ones before it compute, and a model of any size needs the moments of one layer. Each pass over the
calibration batches ends at the last layer that it is made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.layer_input import layer_input
from gossamer.model.quantize_base import linear_names, put
from gossamer.model.quantized_linear import QuantizedLinear, weight_of
from gossamer.model.units import block_names
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
    mode = module.training
    module.eval()
    made: dict[str, QuantizedLayer] = {}
    groups = [_Group(names=chosen)] if calibration is None else _groups(module, chosen, calibration, moments_bytes)
    for group in groups:
        moments = {} if calibration is None else _moments(module, group, calibration)
        for name in group.names:
            made[name] = _quantize(module, name, quantizer, moments.pop(name, None))
            progress(len(made), len(chosen))
    kept = tuple(n for n, p in module.train(mode).named_parameters() if p.ndim > 1)
    return QuantizeReport(layers=tuple(made[name] for name in chosen), kept=kept)


def _check(module: nn.Module, chosen: Sequence[str], quantizer: Quantizer, calibration: Calibration | None) -> None:
    if not chosen:
        raise bad_input(
            wanted="a model with linear layers (torch.nn.Linear, or transformers' Conv1D) to quantize",
            got=f"none in a {type(module).__name__}",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Layers whose moments are gathered together. `end`: the block in which all of their calls lie; "" for none."""

    names: tuple[str, ...]
    end: str = ""


def _groups(module: nn.Module, chosen: Sequence[str], calibration: Calibration, moments_bytes: int) -> Iterator[_Group]:
    """Yield the layers of one block at a time, in the order of their calls, then those that are never called."""
    blocks = block_names(module)
    layers, calls = _calls(module, chosen, blocks, calibration)
    group: list[str] = []
    held, last = 0, ""
    for name in layers:
        block = next((one for one in blocks if name.startswith(f"{one}.")), "")
        size = 8 * weight_of(module.get_submodule(name)).shape[1] ** 2
        if group and (block != last or held + size > moments_bytes):
            yield _Group(names=tuple(group), end=last if calls.get(last) == 1 else "")
            group, held = [], 0
        group.append(name)
        held, last = held + size, block
    if group:
        yield _Group(names=tuple(group), end=last if calls.get(last) == 1 else "")
    yield from (_Group(names=(name,)) for name in chosen if name not in layers)


def _calls(
    module: nn.Module, chosen: Sequence[str], blocks: Sequence[str], calibration: Calibration
) -> tuple[list[str], dict[str, int]]:
    """Return the layers that any batch calls, in their order, and how often the first batch calls each block."""
    order: dict[str, None] = {}
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    for number, batch in enumerate(calibration.batches):
        with _listening(module, chosen, lambda name, x: order.setdefault(name)):
            with _ends(module, blocks if not number else (), count):
                calibration.caller(module, batch)
        if len(order) == len(chosen):
            break
    return [*order], counts


def _moments(module: nn.Module, group: _Group, calibration: Calibration) -> dict[str, Tensor]:
    """Return sum x x^T of each of the layers that are called, over all batches."""
    found: dict[str, Tensor] = {}

    def take(name: str, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        squares = (flat.t() @ flat).double()
        found[name] = found[name].add_(squares) if name in found else squares

    def enough(name: str) -> None:
        raise _Enough

    for batch in calibration.batches:
        with _listening(module, group.names, take), _ends(module, (group.end,) if group.end else (), enough):
            with suppress(_Enough):
                calibration.caller(module, batch)
    return found


class _Enough(BaseException):
    """Ends a forward after the block that was listened to; no code of a model catches it."""


@contextmanager
def _listening(module: nn.Module, names: Sequence[str], heard: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call `heard` with the name and the input of every call of these layers, inside the `with` block."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, kwargs: _nothing(heard(name, layer_input(args, kwargs)))

    hooks = [module.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True) for name in names]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@contextmanager
def _ends(module: nn.Module, names: Sequence[str], ended: Callable[[str], object]) -> Iterator[None]:
    """Call `ended` with the name at the end of every call of these modules, inside the `with` block."""

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, output: _nothing(ended(name))

    hooks = [module.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _nothing(value: object) -> None:
    """Return nothing: what a hook returns takes the place of what it was given."""
