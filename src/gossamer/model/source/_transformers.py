"""The only module that imports transformers to build models: no log output, no network access, clear errors."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install
from gossamer.spec.suggest import nearest

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def library(key: str) -> ModuleType:
    """Import transformers when first needed (seconds), and return it; raise BadInput if it is not installed.

    Its warnings are switched off for good (errors stay): most concern keys nobody wrote, and they come from every rank
    and at any later forward.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise bad_input(wanted="the package transformers", got=str(error), do=install("hf"), key=key) from None
    transformers.utils.logging.set_verbosity_error()
    return transformers


@contextmanager
def quietly(key: str, *, wanted: str) -> Iterator[ModuleType]:
    """Yield transformers without progress bars, Python warnings and network; turn its exceptions into BadInput."""
    transformers = library(key)
    log = transformers.utils.logging
    constants: Any = importlib.import_module("huggingface_hub.constants")
    bars, offline = log.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    log.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers
    except BadInput:
        raise
    except Exception as error:  # whatever a model's own code raises for the user's config
        said = " ".join(str(error).split()) or "no message"
        said = said if len(said) <= 500 else f"{said[:500].rpartition(' ')[0]} ..."
        raise bad_input(
            wanted=wanted, got=f"{type(error).__name__}: {said}", do="remove the cause of this error", key=key
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = offline
        if bars:
            log.enable_progress_bar()


@contextmanager
def replaced(module: ModuleType, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `module.name` by `by(module.name)` in this context."""
    before = getattr(module, name)
    setattr(module, name, by(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def causal_types() -> tuple[str, ...]:
    """Return the model types that have a language model with a causal head."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return tuple(sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def check_keys(config_class: type, given: Mapping[str, Any]) -> None:
    """Raise BadInput for a key that a config class does not know: it would be kept and never read."""
    if dtype := {"dtype", "torch_dtype"} & given.keys():
        raise BadInput(
            "the dtype of the parameters has a key of its own: set model.dtype instead",
            key=f"model.config.{dtype.pop()}",
        )
    base = importlib.import_module("transformers").PretrainedConfig
    known = {*inspect.signature(config_class).parameters, *inspect.signature(base).parameters, "attn_implementation"}
    known = (known | set(getattr(config_class, "attribute_map", {}))) - {"kwargs", "dtype"}
    for name in given:
        if name not in known:
            kind = getattr(config_class, "model_type", config_class.__name__)
            raise BadInput(f"{kind} has no key {name!r}: {nearest(name, known)}", key=f"model.config.{name}")


def check_sizes(config: Any, *, key: str) -> None:
    """Raise BadInput for sizes that transformers takes and no model can have, and for kinds of other layers."""
    for name in _SIZES:
        size = getattr(config, name, 1)
        if isinstance(size, int) and size < 1:
            raise bad_input(wanted=f"{name} of at least 1", got=str(size), do=f"set {name} to 1 or more", key=key)
    text = config.get_text_config()
    kinds, layers = getattr(text, "layer_types", None), getattr(text, "num_hidden_layers", None)
    if isinstance(kinds, (list, tuple)) and isinstance(layers, int) and len(kinds) != layers:
        raise bad_input(
            wanted=f"as many layer_types as num_hidden_layers, {layers}",
            got=f"{len(kinds)}: {', '.join(map(str, kinds))}",
            do=f"set layer_types to a list of {layers} as well",
            key=key,
        )


def drop_foreign_ids(config: Any, written: Mapping[str, Any]) -> None:
    """Unset special token ids that only the model type's defaults name and that the vocabulary does not hold."""
    vocabulary = vocabulary_of(config)
    for name in SPECIAL_IDS:
        value = getattr(config, name, None)
        if name not in written and isinstance(value, int) and vocabulary is not None and value >= vocabulary:
            setattr(config, name, None)


def written(config: Any) -> bytes:
    """Return a config.json with every key: other versions of transformers may have other defaults."""
    keys: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    keys.pop("_name_or_path", None)
    return (json.dumps(keys, indent=2) + "\n").encode()


def vocabulary_of(config: Any) -> int | None:
    """Return the number of token ids, of the text part if there are several; None if unknown."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def positions_of(config: Any) -> int | None:
    """Return the longest sequence in tokens, if the config limits it; else None."""
    size = getattr(config.get_text_config(), "max_position_embeddings", None)
    return size if isinstance(size, int) and size > 0 else None


def fresh(transformers: ModuleType, config: Any, dtype: str) -> nn.Module:
    """Build a module with random weights, in training mode."""
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    assert isinstance(module, nn.Module)
    return module.train()
