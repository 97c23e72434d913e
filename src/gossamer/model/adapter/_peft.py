"""The only module that imports peft: layers are injected into a model, named, and taken out again."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.quantized_linear import QuantizedLinear, is_conv1d
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
    """Replace the layers that `config` names by peft's, in place. They hold the layers they stand for.

    Raises BadInput for layers that peft refuses.
    """
    library()
    mapping = importlib.import_module("peft.mapping")
    # Without a graph: where parameters have no memory, peft's `.to` swaps tensors, which a graph that it left prevents.
    with quiet(), torch.no_grad():
        if any(isinstance(inner, QuantizedLinear) for inner in module.modules()):
            config._register_custom_module({QuantizedLinear: importlib.import_module("peft.tuners.lora.layer").Linear})
        for key in ("target_modules", "feedforward_modules"):
            if given := getattr(config, key, None):
                setattr(config, key, _exact(module, set(given)))
        try:
            mapping.PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](module, config, ADAPTER)
        except ValueError as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise BadInput(f"peft refuses these layers ({said}): name others with targets", key=_KEY) from None
    _call_layers(module)


def _call_layers(module: nn.Module) -> None:
    """Let torch's encoder layers call their linear layers in evaluation too.

    Their fast path reads the weights instead, and would leave the adapter out without a word.
    """
    for inner in module.modules():
        if isinstance(inner, nn.TransformerEncoderLayer) and any(map(is_layer, inner.children())):
            inner.activation_relu_or_gelu = 0  # which is what torch asks before it takes that path


def _exact(module: nn.Module, paths: set[str]) -> set[str] | str:
    """Return what peft takes as the names of the modules at `paths` and of no other: the paths, or an expression.

    peft takes a path for the end of a name: proj would be found in block.proj too, and in some places in k_proj.
    """
    firsts: dict[str, list[str]] = {}
    for path in paths:
        first, _, rest = path.partition(".")
        firsts.setdefault(rest, []).append(first)
    for name in (name for name, _ in module.named_modules() if name not in paths):
        parts = name.split(".")
        for number, part in enumerate(parts, start=1):
            if any(part.endswith(first) for first in firsts.get(".".join(parts[number:]), ())):
                return "|".join(re.escape(path) for path in sorted(paths))
    return paths


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

    A head whose weight was tied to the embedding gets one of its own. Raises BadInput for an adapter with numbers that
    are not finite, and for another layer whose weight is tied: what is merged into it would change the other one too.
    """
    for path, layer in [*layers(module)]:
        _untie(module, path, layer)
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, _merged(path, layer))
    if hasattr(module, "peft_config"):
        del module.peft_config


def _untie(module: nn.Module, path: str, layer: Any) -> None:
    """Give the layer at `path` a weight of its own where another module has the same one."""
    base = layer.get_base_layer()
    weight = base._parameters.get("weight")
    others = [
        name
        for name, inner in module.named_modules()
        if inner is not base and inner is not layer and any(one is weight for one in inner._parameters.values())
    ]
    if weight is None or not others:
        return
    whole: Any = module  # a model of transformers, if it has an output embedding
    config, head = getattr(whole, "config", None), getattr(whole, "get_output_embeddings", None)
    if config is None or not callable(head) or head() is not layer:
        raise BadInput(
            f"the adapter of {path} cannot be merged, as {others[0]} has the same weight: export with --to peft",
            key=_KEY,
        )
    base.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    whole.all_tied_weights_keys = {}


@torch.no_grad()
def _merged(path: str, layer: Any) -> nn.Module:
    """Return the layer that computes what `layer` does, without an adapter; of a layer in blocks, one with a matrix."""
    base = layer.get_base_layer()
    if isinstance(base, QuantizedLinear):
        return base.plain(base.weight + layer.get_delta_weight(ADAPTER).to(base.dtype))
    if not (type(base).forward is nn.Linear.forward or is_conv1d(base)):
        kind = f"a {type(base).__module__}.{type(base).__qualname__}, which computes otherwise than a linear layer"
        raise BadInput(f"{path} is {kind}: its adapter cannot be merged. Export with --to peft", key=_KEY)
    try:
        layer.merge(safe_merge=True)
    except ValueError as error:
        said = f"the adapter of {path} cannot be merged ({error}): export an earlier checkpoint"
        raise BadInput(said, key=_KEY) from None
    found: nn.Module = base
    return found


def folder_files(module: nn.Module, base: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the adapter_config.json of a peft folder; `base`: where peft finds the base model.

    Modules of the base that are trained too are kept whole, as peft's modules_to_save. Raises BadInput for one that
    peft cannot keep so.
    """
    for path, layer in layers(module):
        if not type(layer).__module__.startswith("peft."):
            raise bad_input(
                wanted="an adapter that a peft folder can hold",
                got=f"one on {path} that uses its factors in another way than peft, which would compute otherwise",
                do="export it merged with --to hf",
                key=_KEY,
            )
    saved = _saved_modules(module)
    utils = importlib.import_module("peft.utils")
    config: Any = vars(module)["peft_config"][ADAPTER]
    tensors = utils.get_peft_model_state_dict(module, adapter_name=ADAPTER)
    for path in saved:
        tensors |= {f"{path}.{name}": one for name, one in module.get_submodule(path).state_dict().items()}
    found = dict(config.to_dict())
    if saved:
        found.update(modules_to_save=saved)
    found.update(base_model_name_or_path=base, inference_mode=True)
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}
    return {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}, plain


def _saved_modules(module: nn.Module) -> list[str]:
    """Return the paths of the modules of the base with trained parameters."""
    own = {id(tensor) for _, layer in layers(module) for _, tensor in slots(layer)}
    trained = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in own]
    names: dict[int, int] = {}
    for _, one in module.named_parameters(remove_duplicate=False):
        names[id(one)] = names.get(id(one), 0) + 1
    found = dict.fromkeys(name.rpartition(".")[0] for name in trained)
    paths = [path for path, _ in module.named_modules()]
    for path in found:
        inside = module.get_submodule(path)
        adapted = any(is_layer(inner) for inner in inside.modules())
        tied = any(names[id(one)] > 1 for one in inside.parameters())
        if not path or adapted or tied or sum(one.endswith(path) for one in paths) > 1:
            why = "is adapted too" if adapted else "is tied to another one" if tied else "has no path of its own"
            raise bad_input(
                wanted="trained parameters that a peft folder can hold beside the adapter",
                got=f"those of {path or 'the model itself'}, which {why}",
                do="export with --to hf",
                key=_KEY,
            )
    return list(found)
