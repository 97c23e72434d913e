"""A model source whose model has an adapter on frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gossamer.model.adapter import Adapter, adapt, adapter_tensors, redraw
from gossamer.model.source._weights import give
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.file_digest import digest
from gossamer.store.start_folder import StartFolder


@dataclass(frozen=True)
class AdaptedSource(WrappedSource):
    """The source of the model that `inner` builds, with an adapter.

    `written`: the adapter as it is configured; `start`: the start folder of the model, whose masks an adapter may keep;
    `frozen_files`: absolute paths of those that the adapter takes frozen values of.
    """

    adapter: Adapter
    written: Written
    start: StartFolder | None = None
    frozen_files: tuple[Path, ...] = ()

    def describe(self) -> str:
        return f"{self.inner.describe()}, with {MethodConfig.parse(self.written).name}"

    def build(self, seed: int) -> nn.Module:
        module = self.inner.build(seed)
        adapt(module, self.adapter, seed)
        self.adapter.place_masks(module, self.start, None)
        return module

    def bare(self, seed: int) -> nn.Module:
        """Build the model without weights; one whose layers are made of its weights, with them."""
        module = self.inner.build(seed) if self.adapter.replaces_layers else self.inner.bare(seed)
        adapt(module, self.adapter, seed)
        self.adapter.place_masks(module, self.start, frozenset())
        return module

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights and not self.adapter.replaces_layers

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        """Read the weights of the base, then draw the adapter's tensors, which may follow from these weights."""
        if self.adapter.replaces_layers:
            return frozenset()
        own = {one.name: one.tensor for one in adapter_tensors(module)}
        whole = self.inner.load(module, names - own.keys(), seed=seed)
        for name in names & own.keys():
            give(module, name, torch.empty(own[name].shape, dtype=own[name].dtype))
        redraw(module, self.adapter, names & own.keys(), seed)
        self.adapter.place_masks(module, self.start, names)
        return whole

    def base_digest(self, seed: int) -> str:
        base = [self.inner.fingerprint(), None if self.inner.has_weights else seed]
        return digest(base, self.frozen_files)

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), self.written], self.frozen_files)
