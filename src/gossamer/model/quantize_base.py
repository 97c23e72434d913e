"""Replace the frozen linear layers of a model by quantized ones, in place, and say what that costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from gossamer.model.quantized import WeightFormat
from gossamer.model.quantized import build as format_of
from gossamer.model.quantized_linear import QuantizedLinear, is_conv1d, weight_of
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.spec.suggest import nearest
from gossamer.spec.units import show_bytes


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One weight that is held in blocks: bytes before and after, and |w - w'| / |w| (Frobenius norms; 0: lossless)."""

    name: str
    bytes_before: int
    bytes_after: int
    relative_error: float


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What `quantize_base` did: the quantized weights, and the names of parameters that stay as they are, with why."""

    format: str
    tensors: tuple[QuantizedTensor, ...]
    kept: tuple[tuple[str, str], ...]
    bytes_before: int  # of all parameters and buffers of the module, tied ones once
    bytes_after: int

    def __str__(self) -> str:
        worst = max((one.relative_error for one in self.tensors), default=0.0)
        return (
            f"{len(self.tensors)} linear layers in {self.format}, relative error up to {worst:.2g}: the model takes "
            f"{show_bytes(self.bytes_after)} instead of {show_bytes(self.bytes_before)}"
        )


def quantize_base(
    module: nn.Module, kind: Written | WeightFormat, names: Iterable[str] | None = None
) -> QuantizeReport:
    """Replace linear layers of `module` by `QuantizedLinear` layers of the format `kind`, in place.

    kind: "int8", "int4", "bf16", {"gguf": {"type": "Q8_0"}}, or a format. names: the layers, by module name; None: all
    (nn.Linear and transformers' Conv1D) but those whose weight is tied to another (a head tied to the embedding) and
    the output embedding of a model of transformers. Embeddings, norms and biases stay. The layers are frozen.
    Raises BadInput for a name that is no such layer, and for a tied one.
    """
    format = kind if isinstance(kind, WeightFormat) else format_of(kind)
    chosen = linear_names(module) if names is None else tuple(names)
    before = nbytes_of(module)
    tied = _tied(module)
    made: list[QuantizedTensor] = []
    for name in chosen:
        linear = _named(module, name)
        if f"{name}.weight" in tied:
            raise bad_input(
                wanted="a layer whose weight is its own",
                got=f"{name}, whose weight is also {tied[f'{name}.weight']}",
                do="leave it out: the embedding stays as it is",
            )
        made.append(_replace(module, name, linear, format))
    done = {f"{name}.weight" for name in chosen}
    kept = tuple(
        (name, f"tied to {tied[name]}" if name in tied else "not chosen")
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.ndim > 1 and name not in done
    )
    shown = str(format)
    return QuantizeReport(shown, tuple(made), kept, before, nbytes_of(module))


def linear_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that `quantize_base` replaces by itself."""
    tied, head = _tied(module), _output_embedding(module)
    return tuple(
        name
        for name, one in module.named_modules()
        if _is_linear(one) and f"{name}.weight" not in tied and one is not head
    )


def put(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put `layer` in the place of the submodule `name`."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, layer)


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, tied ones once."""
    tensors: dict[int, Tensor] = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(one.nbytes for one in tensors.values())


def _named(module: nn.Module, name: str) -> nn.Module:
    known: dict[str, nn.Module] = {path: one for path, one in module.named_modules() if _is_linear(one)}
    if name not in known:
        raise BadInput(f"the model has no linear layer {name!r} to quantize: {nearest(name, known)}")
    return known[name]


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def _replace(module: nn.Module, name: str, linear: nn.Module, format: WeightFormat) -> QuantizedTensor:
    weight = weight_of(linear)
    try:
        layer = QuantizedLinear.of(linear, format)
    except BadInput as error:
        raise BadInput(f"{name}: {error.message}", key=error.key) from None
    exact = weight.float()
    apart = float((layer.weight.float() - exact).norm() / exact.norm().clamp_min(1e-30)) if not weight.is_meta else 0.0
    put(module, name, layer)
    after = layer.weight_blocks.nbytes + (0 if layer.weight_scales is None else layer.weight_scales.nbytes)
    return QuantizedTensor(f"{name}.weight", weight.nbytes, after, apart)


def _tied(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter that has several, another of its names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    shared: Collection[list[str]] = [names for names in groups.values() if len(names) > 1]
    return {name: next(other for other in names if other != name) for names in shared for name in names}


def _output_embedding(module: nn.Module) -> nn.Module | None:
    found = getattr(module, "get_output_embeddings", None)
    head = found() if callable(found) else None
    return head if isinstance(head, nn.Module) else None
