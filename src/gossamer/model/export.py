"""Export of a model: a directory that transformers loads, or the user's own weights and how to load them."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gossamer.data.tokenizer import Tokenizer
from gossamer.model.adapter import adapter_folder, adapter_tensors, merge
from gossamer.model.model_profile import tied_names
from gossamer.model.qfa_linear import qfa_layers
from gossamer.model.quantized_linear import BUFFERS, quantized_layers
from gossamer.model.side_folder import check_mergeable
from gossamer.model.source import Files, ModelSource
from gossamer.model.source._transformers import SPECIAL_IDS, quietly
from gossamer.model.source.factory import Factory
from gossamer.model.source.hf import Hf
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.errors import bad_input
from gossamer.store.huggingface import export_adapter_directory, export_directory

_KEY = "export"
_TEMPLATE = "chat_template.jinja"
_ONE_FILE = 1 << 62  # load_model reads one file, of any size


def export_peft(module: nn.Module, base: str, origin: ModelSource | None, target: Path) -> str:
    """Write the adapter of `module` to the new directory `target`, as peft does; return the Python code that loads it.

    `base`: the folder or name of the model that it goes on. Raises BadInput for a model without an adapter, for one on
    random weights, which are in no folder, and if `target` exists.
    """
    check_mergeable(module)
    if next(adapter_tensors(module), None) is None:
        raise bad_input(
            wanted="a run with an adapter, to export as a peft folder",
            got="a run that trained the model itself",
            do="export it with --to hf",
            key=_KEY,
        )
    if qfa_layers(module):
        raise bad_input(
            wanted="an adapter that peft knows",
            got="qfa, whose layers have several widths",
            do="write a subnet of it: gossamer quantize RUN --budget 3 --out DIR",
            key=_KEY,
        )
    named = named_source(origin)
    if isinstance(named, Hf) and not named.has_weights:
        raise bad_input(
            wanted="an adapter on a base that peft can read",
            got=f"one on {named.describe()}, which are in no folder",
            do="export it with --to hf, which writes the base with it",
            key=_KEY,
        )
    tensors, config = adapter_folder(module, base)
    files = origin.files() if origin is not None else {}
    export_adapter_directory(target, tensors, config, {n: file for n, file in files.items() if n != "config.json"})
    if isinstance(named, Factory):
        package, function, arguments = _called(named)
        built = f"{function}({arguments})"
        return f"from {package} import {function}; peft.PeftModel.from_pretrained({built}, {str(target)!r})"
    given = repr(base)
    if Path(base).suffix == ".gguf":  # transformers takes such a file by its folder and its name
        given = f"{str(Path(base).parent)!r}, gguf_file={Path(base).name!r}"
    model = f"transformers.AutoModelForCausalLM.from_pretrained({given})"
    return f"peft.PeftModel.from_pretrained({model}, {str(target)!r})"


def export_hf(module: nn.Module, origin: ModelSource | None, tokenizer: Tokenizer | None, target: Path) -> str:
    """Write `module` to the new directory `target`; return the Python code that loads it.

    A model of transformers becomes what AutoModelForCausalLM.from_pretrained(target) loads, with equal logits: its
    config, its weights in the type they are held in (names and layout as in published checkpoints, tied ones once), and
    a tokenizer: the files of `origin`, or `tokenizer` if it is another one. Another module becomes model.safetensors,
    with a README.md that says how to load it. An adapter is merged into the weights of `module`, in place. Raises
    BadInput if `target` exists, and for a model with a side network.
    """
    check_mergeable(module)
    merge(module)
    inner = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
    files = files_beside(origin, tokenizer)
    if not is_of_transformers(inner):
        config, own, build = _own(inner, origin)
        _export(target, _tensors(inner), config, own, files, max_shard_bytes=_ONE_FILE)
        return f"module = {build}; safetensors.torch.load_model(module, {str(target / 'model.safetensors')!r})"
    with quietly(_KEY, wanted=f"a {type(inner).__name__} that transformers can save"):
        config, tensors = _config_of(inner), _published(inner, _tensors(inner))
    if (generation := getattr(inner, "generation_config", None)) is not None:
        files.setdefault("generation_config.json", _generation(generation))
    _export(target, tensors, config, {}, files)
    return f"transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})"


def described(
    module: nn.Module, origin: ModelSource | None, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], Files]:
    """Return the config.json of a folder that holds `module`, and the files beside it: tokenizer and the like."""
    files = files_beside(origin, tokenizer)
    if not is_of_transformers(module):
        config, _, _ = _own(module, origin)
        return config, files
    with quietly(_KEY, wanted=f"a {type(module).__name__} that transformers can save"):
        config = _config_of(module)
    if (generation := getattr(module, "generation_config", None)) is not None:
        files.setdefault("generation_config.json", _generation(generation))
    return config, files


def _export(
    target: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    own: Files,
    files: Files,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    beside: Files = dict(own)
    beside.update(files)
    export_directory(target, tensors, config, beside, max_shard_bytes=max_shard_bytes)


def files_beside(origin: ModelSource | None, tokenizer: Tokenizer | None) -> Files:
    """Return the files of `origin`, unless the model was trained with another tokenizer."""
    files = origin.files() if origin is not None else {}
    if tokenizer is None:
        return files
    with tempfile.TemporaryDirectory() as folder:
        saved: Files = {file.name: file.read_bytes() for file in tokenizer.save(Path(folder))}
    if _vocabulary(files) == _vocabulary(saved):  # the same one: its files name more special tokens
        if tokenizer.template is not None and _template(files) != tokenizer.template.source:
            files[_TEMPLATE] = saved[_TEMPLATE]
        return files
    kept: Files = {name: file for name, file in files.items() if name == "generation_config.json"}
    kept.update(saved)
    return kept


def _template(files: Files) -> Any:
    """Return the chat template that transformers would read from tokenizer files."""
    found = files.get(_TEMPLATE)
    if found is not None:
        return _read(found).decode("utf-8")
    config = files.get("tokenizer_config.json")
    return json.loads(_read(config)).get("chat_template") if config is not None else None


def _read(file: bytes | Path) -> bytes:
    return file if isinstance(file, bytes) else file.read_bytes()


def _vocabulary(files: Files) -> Any:
    """Return the ids and merges of a tokenizer.json."""
    found = files.get("tokenizer.json")
    if found is None:
        return None
    read = json.loads(_read(found))
    return read.get("model"), [(token["id"], token["content"]) for token in read.get("added_tokens", ())]


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a transformers model; imports transformers only if it may be."""
    if not any(base.__module__.startswith("transformers.") for base in type(module).__mro__):
        return False
    return isinstance(module, importlib.import_module("transformers").PreTrainedModel)


def special_ids(module: nn.Module) -> dict[str, Any]:
    """Return the special token ids that a transformers model's config says, by key; none for another module."""
    if not is_of_transformers(module):
        return {}
    said: dict[str, Any] = module.config.to_dict()  # type: ignore[union-attr, operator]
    return {key: said[key] for key in SPECIAL_IDS if key in said}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of `module` as published: every tied parameter once, the weights of quantized layers decoded."""
    state = untied_state(module)
    for name, layer in quantized_layers(module).items():
        state[f"{name}.weight"] = layer.weight_as_given()
        for buffer in BUFFERS:
            state.pop(f"{name}.{buffer}", None)
    return {name: tensor.detach().contiguous() for name, tensor in state.items()}


def untied_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of `module` with every tied parameter under one name: the one that its tie points at."""
    state: dict[str, Tensor] = module.state_dict()
    ties: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    for names in tied_names(module):
        kept = next((n for n in names if n not in ties), names[0])
        for name in names:
            if name != kept:
                state.pop(name, None)
    return state


def _published(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and layout of published checkpoints; transformers fuses some in memory."""
    loader = importlib.import_module("transformers.core_model_loading")
    found: dict[str, Tensor] = loader.revert_weight_conversion(module, tensors)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def config_of(module: nn.Module) -> dict[str, Any] | None:
    """Return config.json of a model of transformers; None for another module."""
    return _config_of(module) if is_of_transformers(module) else None


def _config_of(module: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(module.config.to_json_string(use_diff=True))
    config.pop("_name_or_path", None)
    config["architectures"] = [type(module).__name__]
    config["dtype"] = str(module.dtype).removeprefix("torch.")
    return config


def _generation(config: Any) -> bytes:
    return str(config.to_json_string(use_diff=True)).encode()


def _own(module: nn.Module, origin: ModelSource | None) -> tuple[dict[str, Any], Files, str]:
    """Return config.json and README.md of a module that transformers does not know, and the code that builds it."""
    config: dict[str, Any] = {"class": f"{type(module).__module__}.{type(module).__qualname__}"}
    build, made = "module = ...  # build it as before training", f"{type(module).__qualname__}(...)"
    if isinstance(origin, Factory):
        package, function, arguments = _called(origin)
        config |= {"factory": origin.of, "arguments": dict(origin.config), "dtype": origin.dtype}
        build = f"from {package} import {function}\nmodule = {function}({arguments})"
        made = f"{package}.{function}({arguments})"
    readme = _README.format(name=config["class"], build=build)
    return config, {"README.md": readme.encode()}, made


def _called(factory: Factory) -> tuple[str, str, str]:
    """Return the package, the function, and its arguments as Python code writes them."""
    package, _, function = factory.of.partition(":")
    return package, function, ", ".join(f"{name}={value!r}" for name, value in factory.config.items())


def named_source(origin: ModelSource | None) -> ModelSource | None:
    """Return the source that the configuration names, without what was put around it."""
    while isinstance(origin, WrappedSource):
        origin = origin.inner
    return origin


_README = """\
# Weights of {name}

model.safetensors holds them by parameter name, tied ones once. To load them:

```python
from safetensors.torch import load_model
{build}
load_model(module, "model.safetensors")
```
"""
