"""A model source whose frozen model has a side network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gossamer.model.side import CHILD, SideNetwork, attach, redraw, side_tensors
from gossamer.model.source._weights import give
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.method_config import MethodConfig, Written
from gossamer.store.file_digest import digest


@dataclass(frozen=True)
class SidedSource(WrappedSource):
    """The source of the model that `inner` builds, with a side network. `written`: as it is configured."""

    side: SideNetwork
    written: Written

    def describe(self) -> str:
        return f"{self.inner.describe()}, with {MethodConfig.parse(self.written).name}"

    def build(self, seed: int) -> nn.Module:
        module = self.inner.build(seed)
        attach(module, self.side, seed)
        return module

    def bare(self, seed: int) -> nn.Module:
        module = self.inner.bare(seed)
        attach(module, self.side, seed)
        return module

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        own = dict(side_tensors(module))
        route = module._modules.pop(CHILD)  # the source inside knows a model without it
        try:
            whole = self.inner.load(module, names - own.keys(), seed=seed)
        finally:
            module._modules[CHILD] = route
        for name in names & own.keys():
            give(module, name, torch.empty(own[name].shape, dtype=own[name].dtype))
        redraw(module, names & own.keys(), seed)
        return whole

    def base_digest(self, seed: int) -> str:
        return digest([self.inner.fingerprint(), None if self.inner.has_weights else seed])

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), self.written])
