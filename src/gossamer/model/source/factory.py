"""A function of the user that returns an nn.Module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gossamer.model.seeded import seeded
from gossamer.model.source import Files, ModelSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.spec.user_function import check_arguments, complaint, function_named
from gossamer.store.file_digest import digest

_KEY = "model.factory"
_VOCABULARY = ("vocabulary", "vocab_size")  # a parameter of one of these names is the number of token ids


@dataclass(frozen=True)
class Factory(ModelSource):
    """A model source that calls the user's function `of`, "package.module:function", with keyword arguments `config`.

    The Python module is looked for in the working directory too. A parameter `vocabulary` or `vocab_size` that `config`
    leaves out gets the tokenizer's size.
    """

    of: str
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "float32"

    @classmethod
    def read(cls, section: ModelSection) -> Factory:
        assert section.factory is not None
        return cls(of=section.factory, config=section.config, dtype=section.dtype)

    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> Factory:
        if self.vocabulary() is not None:
            return self
        known = inspect.signature(self._function).parameters
        return replace(self, config={**{n: vocabulary for n in _VOCABULARY if n in known}, **self.config})

    def describe(self) -> str:
        return f"{self.of}({', '.join(f'{name}={value!r}' for name, value in self.config.items())})"

    def vocabulary(self) -> int | None:
        sizes = [self.config[name] for name in _VOCABULARY if isinstance(self.config.get(name), int)]
        return sizes[0] if sizes else None

    def positions(self) -> int | None:
        return None

    def build(self, seed: int) -> nn.Module:
        function = self._function
        check_arguments(function, self.of, self.config, key="model.config")
        with seeded(seed):
            try:
                module = function(**self.config)
            except Exception as error:
                raise complaint(f"{self.of} to return a model", error, key=_KEY) from error
        if not isinstance(module, nn.Module):
            raise bad_input(
                wanted=f"an nn.Module from {self.of}",
                got=f"a {type(module).__name__}",
                do="return the model itself",
                key=_KEY,
            )
        _check_shapes(module)
        _hold_in(module, getattr(torch, self.dtype))
        return module.train()

    @property
    def code(self) -> Callable[..., Any] | None:
        return self._function

    def bare(self, seed: int) -> nn.Module:
        return self.build(seed)

    @property
    def has_weights(self) -> bool:
        return False

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        return frozenset()

    def files(self) -> Files:
        return {}

    def kept(self) -> Files:
        return {}

    def fingerprint(self) -> str:
        source = inspect.getsourcefile(self._function)
        return digest([self.of, dict(self.config), self.dtype], [Path(source)] if source else [])

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return function_named(self.of, key=_KEY)


def _check_shapes(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise bad_input(
                wanted="a model whose parameters have shapes",
                got=f"{name} of a lazy module that was never called",
                do="call the model once in the factory, on an example, before it is returned",
                key=_KEY,
            )


def _hold_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert tensors as `module.to(dtype)` does, one by one, and only those of another type.

    module.to makes new objects, but a build of a part of a model tells parameters apart by identity.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
