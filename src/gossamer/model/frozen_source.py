"""A model source of which some parameters are frozen, or trained although an adapter freezes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.model.side import check_trained
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest


@dataclass(frozen=True)
class FrozenSource(WrappedSource):
    """The source of the model that `inner` builds, with other parameters trained.

    `freeze` and `unfreeze` are regular expressions; a parameter in whose name one of the second is found is trained.
    """

    freeze: tuple[str, ...]
    unfreeze: tuple[str, ...]

    def build(self, seed: int) -> nn.Module:
        return self._chosen(self.inner.build(seed))

    def bare(self, seed: int) -> nn.Module:
        return self._chosen(self.inner.bare(seed))

    def _chosen(self, module: nn.Module) -> nn.Module:
        params = dict(module.named_parameters())
        for patterns, key, trained in ((self.freeze, "model.freeze", False), (self.unfreeze, "model.unfreeze", True)):
            for name in _found(params, patterns, key=key):
                params[name].requires_grad_(trained)
        if not any(p.requires_grad for p in params.values()):
            raise bad_input(
                wanted="at least one parameter to train",
                got=f"all {len(params)} frozen by {', '.join(map(repr, self.freeze))}",
                do="name fewer parameters",
                key="model.freeze",
            )
        check_trained(module)
        return module


def _found(names: Sequence[str] | dict[str, nn.Parameter], patterns: Sequence[str], *, key: str) -> list[str]:
    """Return the names in which a pattern is found; raise BadInput for one that is found in none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=key) from None
        matched = [name for name in names if wanted.search(name)]
        if not matched:
            raise BadInput(f"no parameter has {pattern!r} in its name: {nearest(pattern, list(names))}", key=key)
        found |= dict.fromkeys(matched)
    return list(found)
