"""Leaving a module as it was before its forward ran."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from gossamer.model.cut.operators import written


@dataclass
class Buffers:
    """Copies of the buffers that a forward changes (running means), each made right before that."""

    key: Callable[[Tensor], int]
    known: dict[int, list[Tensor]] = field(default_factory=dict)  # memory -> buffers in it
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(module: nn.Module, key: Callable[[Tensor], int]) -> Buffers:
        known: dict[int, list[Tensor]] = {}
        for buffer in module.buffers():
            known.setdefault(key(buffer), []).append(buffer)
        return Buffers(key, known)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`func` is about to run."""
        changed = [*written(func, args, kwargs)]
        if func.namespace != "aten" or "batch_norm" in func.name():  # these do not say what they change
            changed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for key in {self.key(x) for x in changed} & (self.known.keys() - self.kept.keys()):
            self.kept[key] = [buffer.detach().clone() for buffer in self.known[key]]

    def put_back(self) -> None:
        """As before the forward."""
        with torch.no_grad():
            for key, copies in self.kept.items():
                for buffer, was in zip(self.known[key], copies, strict=True):
                    if buffer.shape == was.shape:
                        buffer.copy_(was)


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Generators as before, and attributes without the tensors of a graph, or without numbers, that they now hold."""
    before = [_Attributes(vars(inner)) for inner in module.modules()]
    registered = [(inner._buffers, dict(inner._buffers)) for inner in module.modules()]
    others = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # it may hold weights without numbers
            random.setstate(others[0])
            np.random.set_state(others[1])
            for attributes in before:
                attributes.put_back()
            for now, then in registered:  # buffers that were assigned anew
                now.clear()
                now.update(then)


class _Attributes:
    """Those of one module, with what the lists and dicts among them hold."""

    def __init__(self, now: dict[str, Any]) -> None:
        self.now, self.then = now, dict(now)
        self.held = {name: copy.copy(x) for name, x in now.items() if type(x) in (list, dict)}

    def put_back(self) -> None:
        for name in [n for n, x in self.now.items() if any(map(_is_passing, tree_leaves(x)))]:
            self.now.pop(name)
            if name not in self.then:
                continue
            self.now[name] = container = self.then[name]
            if type(container) is list:
                container[:] = self.held[name]
            elif type(container) is dict:
                container.clear()
                container.update(self.held[name])


def _is_passing(x: Any) -> bool:
    return isinstance(x, Tensor) and (isinstance(x, FakeTensor) or not x.is_leaf)
