"""A Hugging Face model: a local directory, or a model type with the keys of its config."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.model.seeded import seeded
from gossamer.model.source import Files, ModelSource
from gossamer.model.source import _transformers as kit
from gossamer.model.source._weights import give, load_safetensors
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest
from gossamer.store.file_digest import digest

_KEY = "model.hf"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_BESIDE = (  # files beside config and weights, all of them data
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "generation_config.json"),
)


@dataclass(frozen=True)
class Hf(ModelSource):
    """A model source for Hugging Face models. `config` sets keys of the model's config.

    `of` is one of three: a directory with config.json (its safetensors are loaded if there are any), a model type such
    as `llama`, or the name of a model in the local Hugging Face cache. Nothing is downloaded, no code from a directory
    is run, no pickle is read.
    """

    of: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "float32"

    @classmethod
    def read(cls, section: ModelSection) -> Hf:
        assert section.hf is not None
        return cls(of=section.hf, config=section.config, dtype=section.dtype)

    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> Hf:
        if self._directory is not None:
            return self
        open_keys = {"vocab_size": vocabulary, "bos_token_id": separator, "eos_token_id": separator}
        return replace(self, config={**open_keys, **self.config})

    def describe(self) -> str:
        if self._directory is None:
            return f"{self.of} from its config, random weights"
        return f"{self.of} ({self._config.model_type}, {'its' if self.has_weights else 'random'} weights)"

    @property
    def has_weights(self) -> bool:
        """Return whether there are weights to load."""
        return self._directory is not None and any(self._directory.glob("*.safetensors"))

    def vocabulary(self) -> int | None:
        return kit.vocabulary_of(self._config)

    def positions(self) -> int | None:
        return kit.positions_of(self._config)

    def build(self, seed: int) -> nn.Module:
        config = self._config
        with seeded(seed), kit.quietly(_KEY, wanted=f"to build {self.describe()}") as transformers:
            if not self.has_weights:
                return kit.fresh(transformers, config, self.dtype)
            module, found = transformers.AutoModelForCausalLM.from_pretrained(
                str(self._directory),
                config=config,
                dtype=getattr(torch, self.dtype),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        if missing := sorted(found["missing_keys"]):
            raise bad_input(
                wanted=f"all weights of {self._config.model_type} in {self._directory}",
                got=f"no weights for {', '.join(missing[:3])} ({len(missing)} in all)",
                do="give a complete directory, or remove its weights to start from random ones",
                key=_KEY,
            )
        assert isinstance(module, nn.Module)
        return module.train()

    @property
    def code(self) -> Callable[..., Any] | None:
        return None

    def bare(self, seed: int) -> nn.Module:
        with seeded(seed), kit.quietly(_KEY, wanted=f"to build {self.describe()}") as transformers:
            return kit.fresh(transformers, self._config, self.dtype)

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        """Read weights by name if files name tensors as the model does; else (fused experts) read the model once."""
        if not self.has_weights:
            return frozenset()
        assert self._directory is not None
        if missing := load_safetensors(self._directory, module, names):
            whole = self.build(0).state_dict()
            for name in missing:
                give(module, name, whole[name])
        return missing

    def files(self) -> Files:
        if self._directory is None:
            return {}
        return {name: self._directory / name for name in _BESIDE if (self._directory / name).is_file()}

    def kept(self) -> Files:
        return {**self.files(), "config.json": kit.written(self._config)}

    def fingerprint(self) -> str:
        weights = self._directory.glob("*.safetensors") if self._directory is not None else ()
        config = {**self._config.to_dict(), "dtype": self.dtype}  # transformers sets the config's when it builds
        return digest([config, self.dtype], weights)

    @cached_property
    def _directory(self) -> Path | None:
        """Return the directory of config.json, which stays itself in another current folder; None for a model type."""
        path = Path(self.of).expanduser().absolute()
        if path.is_dir():
            return _checked(path)
        if path.exists():
            raise bad_input(wanted="a directory with config.json", got=f"the file {path}", do=_hint(path), key=_KEY)
        if "/" in self.of:
            return _cached(self.of)
        return None

    @cached_property
    def _config(self) -> Any:
        directory = self._directory
        wanted = f"config keys of {self.of}"
        with kit.quietly("model.config" if self.config else _KEY, wanted=wanted) as transformers:
            if directory is None:
                config = _of_type(transformers, self.of, self.config)
            else:
                _check_known(transformers, directory)
                config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
                kit.check_keys(type(config), self.config)
                config = type(config).from_pretrained(str(directory), local_files_only=True, **self.config)
        _check_causal(config.model_type)
        kit.check_sizes(config, key="model.config")
        return config


def _check_known(transformers: Any, directory: Path) -> None:
    kind = json.loads((directory / "config.json").read_text("utf-8"))["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise bad_input(
            wanted=f"a model_type in {directory / 'config.json'} that transformers {transformers.__version__} knows",
            got=repr(kind),
            do=f"{nearest(str(kind), kit.causal_types())} A newer transformers may know it; else give a factory",
            key=_KEY,
        )


def _of_type(transformers: Any, kind: str, keys: Mapping[str, Any]) -> Any:
    if kind not in transformers.CONFIG_MAPPING:
        close = nearest(kind, kit.causal_types())
        raise bad_input(
            wanted="a local directory or a model type of transformers",
            got=f"{kind!r}, which is neither",
            do=close if close.startswith("did") else "such as llama, qwen3, gpt2 or mamba",
            key=_KEY,
        )
    _check_causal(kind)
    kit.check_keys(type(transformers.AutoConfig.for_model(kind)), keys)
    config = transformers.AutoConfig.for_model(kind, **keys)
    kit.drop_foreign_ids(config, keys)
    return config


def _check_causal(kind: str) -> None:
    if kind not in kit.causal_types():
        raise BadInput(
            f"{kind} has no causal language model in transformers: give a function that builds the model "
            "(model.factory)",
            key=_KEY,
        )


def _checked(directory: Path) -> Path:
    file = directory / "config.json"
    try:
        keys = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise bad_input(
            wanted=f"a readable {file}", got=str(error), do="give the directory of a transformers model", key=_KEY
        ) from None
    if not isinstance(keys, dict) or "model_type" not in keys:
        raise bad_input(
            wanted=f"model_type in {file}", got="no such key", do="give the directory of a transformers model", key=_KEY
        )
    pickles = sorted(name.name for pattern in _PICKLES for name in directory.glob(pattern))
    if pickles and not any(directory.glob("*.safetensors")):
        raise bad_input(
            wanted=f"weights as safetensors in {directory}",
            got=f"{pickles[0]}, a pickle, which can run any code when it is loaded",
            do="if you trust it, load it with transformers, save it with model.save_pretrained(DIR), and give that DIR",
            key=_KEY,
        )
    return directory


def _cached(name: str) -> Path:
    """Return the directory of a model that the user has downloaded to the local cache before."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise bad_input(
            wanted="an existing directory with config.json",
            got=f"{name}, which does not exist",
            do="correct the path",
            key=_KEY,
        )
    try:
        found = importlib.import_module("huggingface_hub").try_to_load_from_cache(name, "config.json")
    except ValueError:  # no valid repository name
        found = None
    if not isinstance(found, str):
        raise bad_input(
            wanted="a local directory, a model type, or a model in the local cache",
            got=f"{name!r}, which is none of these",
            do=f"run hf download {name} --local-dir DIR, and set model.hf: DIR (nothing is downloaded by gossamer)",
            key=_KEY,
        )
    return _checked(Path(found).parent)


def _hint(path: Path) -> str:
    return "write model.gguf for a GGUF file" if path.suffix == ".gguf" else "give the directory it lies in"
