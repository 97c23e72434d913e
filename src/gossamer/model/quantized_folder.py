"""A model source of a quantized folder (`gossamer quantize`), and what such a folder holds of a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.data.tokenizer import Tokenizer
from gossamer.model.export import described, is_of_transformers, named_source, untied_state
from gossamer.model.model_profile import tied_names
from gossamer.model.qfa_linear import QfaLinear, qfa_layers
from gossamer.model.quantize_base import put
from gossamer.model.quantized import WeightFormat
from gossamer.model.quantized import build as format_of
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import BUFFERS, QuantizedLinear, quantized_layers
from gossamer.model.source import Files, ModelSource, named_by
from gossamer.model.source.factory import Factory
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Written
from gossamer.store.file_digest import digest
from gossamer.store.quantized_folder import LayerHead, QuantizedContent, QuantizedFolder

_BESIDE = ("quantized.json", "config.json", "README.md")


def quantized_folder_of(section: ModelSection) -> QuantizedFolder | None:
    """Return the quantized folder that `model.start` or `model.hf` names; None where neither does.

    It describes its model itself: `model.hf` or `model.factory` beside `model.start` is not read. Raises BadInput for
    a base or a config beside it, and for both at once.
    """
    named = {key: Path(place).expanduser() for key in ("start", "hf") if (place := getattr(section, key)) is not None}
    found = [key for key, path in named.items() if QuantizedFolder.is_at(path)]
    if not found:
        return None
    if found == ["hf"] and "start" in named:
        raise bad_input(
            wanted="weights of one place",
            got=f"the quantized folder {section.hf} and model.start",
            do="leave model.start out, or name the model in full precision",
            key="model.start",
        )
    for key, is_set in (("base", section.base != "full"), ("config", found == ["hf"] and bool(section.config))):
        if is_set:
            raise bad_input(
                wanted=f"no model.{key} beside a quantized folder, whose layers and sizes are what they are",
                got=f"{getattr(section, key)!r} with {named[found[0]]}",
                do="leave it out",
                key=f"model.{key}",
            )
    return QuantizedFolder(named[found[0]].absolute(), key=f"model.{found[0]}")


@dataclass(frozen=True)
class QuantizedFolderSource(WrappedSource):
    """The source of the model in a quantized folder, whose `inner` source describes it without weights."""

    folder: QuantizedFolder

    @classmethod
    def of(cls, folder: QuantizedFolder, dtype: str = "float32") -> QuantizedFolderSource:
        """Return the source of a folder. `dtype`: of everything but the integers and their scales."""
        model = {**folder.model, "dtype": dtype}
        if model.get("hf") is not None:
            model["hf"] = str(folder.path)
        return cls(_inner_of(model, folder), folder)

    def describe(self) -> str:
        return f"{self.folder.path} (quantized by {self.folder.said.get('by', self.folder.method)})"

    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> ModelSource:
        return self

    def build(self, seed: int) -> nn.Module:
        """Build the module without weights, put quantized layers in, and read every tensor. Raises BadInput."""
        module = self.inner.bare(seed)
        layers = self.folder.layers
        for name, head in layers.items():
            put(module, name, _layer(module, name, head, self.folder))
        given = dict(self.folder.tensors())
        tied = {name: names[0] for names in tied_names(module) for name in names}
        state = module.state_dict()
        wanted = {tied.get(name, name) for name in state}
        found = {tied.get(name, name): tensor for name, tensor in given.items()}
        if differing := sorted(wanted ^ found.keys()):
            where = "not in the folder" if differing[0] in wanted else "not in the model"
            raise self.folder.damaged(f"{differing[0]}, which is {where} ({len(differing)} such tensors)")
        for name, tensor in found.items():
            held = state[name]
            if held.shape != tensor.shape:
                raise self.folder.damaged(f"{name} of shape {tuple(tensor.shape)}, not {tuple(held.shape)}")
            held.copy_(tensor)
        return module

    def bare(self, seed: int) -> nn.Module:
        """Build what `build` builds: blocks are buffers, which every rank holds."""
        return self.build(seed)

    @property
    def has_weights(self) -> bool:
        return True

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        return frozenset()

    def files(self) -> Files:
        own = (one for one in self.folder.path.iterdir() if one.is_file() and one.name not in _BESIDE)
        return {one.name: one for one in own if one.suffix != ".safetensors"}

    def kept(self) -> Files:
        """Return nothing: the folder itself is needed to build the model again."""
        return {}

    def fingerprint(self) -> str:
        return digest("quantized", self.folder.files())


def _inner_of(model: Mapping[str, Any], folder: QuantizedFolder) -> ModelSource:
    """Return the source that quantized.json names. Raises BadInput for one that it cannot name."""
    if not (model.keys() <= {"hf", "factory", "config", "dtype"} and ("hf" in model) != ("factory" in model)):
        raise folder.damaged("a quantized.json that names no model")
    return named_by(ModelSection(**model))


def _layer(module: nn.Module, name: str, head: LayerHead, folder: QuantizedFolder) -> nn.Module:
    """Return a layer without values in the place of the linear layer `name`."""
    try:
        linear = module.get_submodule(name)
    except AttributeError:
        raise folder.damaged(f"a layer {name}, which the model does not have") from None
    rows, columns = head.shape
    weight = getattr(linear, "weight", None)
    shape = (columns, rows) if head.is_turned else (rows, columns)
    if not isinstance(weight, Tensor) or tuple(weight.shape) != shape:
        raise folder.damaged(f"a layer {name} of shape {head.shape}, which is another one in the model")
    format = format_of(head.format, key="quantized.json")
    if head.rank:
        if not isinstance(format, Packed):
            raise folder.damaged(f"an adapter on {name}, whose weight is no packed integers")
        return QfaLinear(linear, (format.bits,), group=format.group, rank=head.rank, scale=head.scale)
    made = QuantizedLinear(columns, rows, format, bias=head.has_bias, dtype=weight.dtype, is_turned=head.is_turned)
    return made.train(linear.training)


def quantized_content(
    module: nn.Module,
    origin: ModelSource,
    tokenizer: Tokenizer | None,
    *,
    method: Written,
    said: Mapping[str, Any],
    dtype: torch.dtype,
) -> QuantizedContent:
    """Return what a quantized folder holds of `module`, which `origin` built and whose layers were quantized then.

    dtype: of the floating tensors that stay as they are.
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    config, files = described(inner, origin, tokenizer)
    subnet = qfa_layers(inner)
    inside = tuple(f"{name}." for name in subnet)
    layers = {name: _head(one) for name, one in quantized_layers(inner).items() if not name.startswith(inside)}
    layers |= {
        name: replace(_head(one.held(one.width)), rank=one.rank, scale=one.scale) for name, one in subnet.items()
    }
    return QuantizedContent(
        tensors={name: stored(name, one, dtype) for name, one in untied_state(inner).items()},
        layers=layers,
        model=_model(inner, origin),
        method=method,
        source=origin.fingerprint(),
        config=config,
        files={name: one for name, one in files.items() if name not in _BESIDE},
        said=said,
    )


def stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as the folder holds it: scales and integers as they are, others in `dtype`."""
    is_own = name.rpartition(".")[2] in BUFFERS or not tensor.is_floating_point()
    return tensor if is_own else tensor.to(dtype)


def _head(layer: QuantizedLinear) -> LayerHead:
    return LayerHead(
        format=written_format(layer.format),
        shape=(layer.out_features, layer.in_features),
        is_turned=layer.is_turned,
        has_bias=layer.bias is not None,
    )


def written_format(format: WeightFormat) -> Written:
    """Return a format as a configuration writes it, with all of its fields."""
    values = {one.name: getattr(format, one.name) for one in fields(format)}  # type: ignore[arg-type]
    return {type(format).__module__.rpartition(".")[2]: values}


def _model(module: nn.Module, origin: ModelSource) -> dict[str, Any]:
    """Return what builds the model again. Raises BadInput for a module that nothing can build."""
    if is_of_transformers(module):
        return {"hf": "."}
    named = named_source(origin)
    if isinstance(named, Factory):
        return {"factory": named.of, "config": dict(named.config)}
    raise bad_input(
        wanted="a model of transformers, or one that a factory makes, to quantize",
        got=f"a {type(module).__name__} that a program built",
        do="give a factory: model.factory",
    )
