"""The only module that imports peft: layers are injected into a model, named, and taken out again."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.quantized_linear import QuantizedLinear
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install

_KEY = "model.adapter"
ADAPTER = "default"  # peft's own name for the one adapter of a model


def library() -> ModuleType:
    """Import peft when first needed, and return it; raise BadInput if it is not installed."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise bad_input(wanted="the package peft", got=str(error), do=install("adapt"), key=_KEY) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Python warnings in this context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def inject(module: nn.Module, config: Any) -> None:
    """Replace the layers that `config` names by peft's, in place. They hold the layers they stand for."""
    library()
    mapping = importlib.import_module("peft.mapping")
    # Without a graph: where parameters have no memory, peft's `.to` swaps tensors, which a graph that it left prevents.
    with quiet(), torch.no_grad():
        if any(isinstance(inner, QuantizedLinear) for inner in module.modules()):
            config._register_custom_module({QuantizedLinear: importlib.import_module("peft.tuners.lora.layer").Linear})
        mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](module, config, ADAPTER)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is one of peft's layers; imports nothing."""
    return any(
        base.__name__ == "BaseTunerLayer" and base.__module__.startswith("peft.") for base in type(module).__mro__
    )


def layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers in `module`, by path."""
    for path, inner in module.named_modules():
        if is_layer(inner):
            yield path, inner


def slots(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's tensors that a layer of peft holds, by the attribute that holds them."""
    if not is_layer(layer):
        return
    for slot in dict.fromkeys(layer.adapter_layer_names):
        held = getattr(layer, slot, None)
        if held is None or ADAPTER not in held:
            continue
        inner = held[ADAPTER]
        yield slot, inner if isinstance(inner, Tensor) else inner.weight


def give_short_names(module: nn.Module) -> None:
    """Register a second name for every tensor of peft's layers: that of the layer without an adapter, or the slot's.

    It comes first in `named_parameters`, so it is the canonical one.
    """
    for _, layer in layers(module):
        layer._parameters.update(layer.get_base_layer()._parameters)
        for slot, tensor in slots(layer):
            held = getattr(layer, slot)._parameters
            others = dict(held)  # of a ParameterDict, the tensor itself
            held.clear()
            held.update({"weight": tensor, **others})


def merge(module: nn.Module) -> None:
    """Merge the adapter into the weights and put the layers back, in place; a model without an adapter stays as it is.

    Raises BadInput for an adapter with numbers that are not finite.
    """
    for path, layer in [*layers(module)]:
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, _merged(path, layer))
    if hasattr(module, "peft_config"):
        del module.peft_config


@torch.no_grad()
def _merged(path: str, layer: Any) -> nn.Module:
    """Return the layer that computes what `layer` does, without an adapter; of a layer in blocks, one with a matrix."""
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        if base.is_turned:
            raise BadInput(f"{path} is a Conv1D in blocks, which cannot be merged: export with --to peft", key=_KEY)
        whole = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, dtype=base.dtype)
        whole.weight.copy_(base.weight + layer.get_delta_weight(ADAPTER).to(base.dtype))
        if base.bias is not None:
            whole.bias = base.bias
        return whole.train(base.training)
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        said = f"the adapter of {path} cannot be merged ({error}): export an earlier checkpoint"
        raise BadInput(said, key=_KEY) from None
    found: nn.Module = base
    return found


def folder_files(module: nn.Module, base: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the adapter_config.json of a peft folder; `base`: where peft finds the base model."""
    utils = importlib.import_module("peft.utils")
    config: Any = vars(module)["peft_config"][ADAPTER]
    tensors = utils.get_peft_model_state_dict(module, adapter_name=ADAPTER)
    found = dict(config.to_dict())
    found.update(base_model_name_or_path=base, inference_mode=True)
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}, plain
