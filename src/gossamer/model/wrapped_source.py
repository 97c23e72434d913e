"""A model source around another one: what it does not change, the inner source answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gossamer.model.source import Files, ModelSource
from gossamer.spec.config import ModelSection


@dataclass(frozen=True)
class WrappedSource(ModelSource):
    """The base of sources that change what the source `inner` builds."""

    inner: ModelSource

    @classmethod
    def read(cls, section: ModelSection) -> ModelSource:
        raise NotImplementedError("`origin_of` wraps the source that the configuration names")

    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> ModelSource:
        return replace(self, inner=self.inner.fitted_to_tokenizer(vocabulary, separator))

    def describe(self) -> str:
        return self.inner.describe()

    def vocabulary(self) -> int | None:
        return self.inner.vocabulary()

    def positions(self) -> int | None:
        return self.inner.positions()

    def build(self, seed: int) -> nn.Module:
        return self.inner.build(seed)

    @property
    def code(self) -> Callable[..., Any] | None:
        return self.inner.code

    def bare(self, seed: int) -> nn.Module:
        return self.inner.bare(seed)

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        return self.inner.load(module, names, seed=seed)

    def files(self) -> Files:
        return self.inner.files()

    def kept(self) -> Files:
        return self.inner.kept()

    def base_digest(self, seed: int) -> str:
        return self.inner.base_digest(seed)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()
