"""Restore a module to its state before a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.model.python_state.context_variables import context_kept
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.trace_backends import written


@dataclass
class SavedBuffers:
    """The copies of lasting tensors (buffers, memory banks) that a forward changes, made right before each change."""

    key: Callable[[Tensor], int]
    known: dict[int, list[Tensor]] = field(default_factory=dict)  # memory -> buffers in it
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Register tensors that the forward may change."""
        for tensor in tensors:
            if tensor.numel() > 1 and not any(tensor.stride()):
                continue  # without memory of its own
            self.known.setdefault(self.key(tensor), []).append(tensor)

    def save_before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the registered tensors that the operator `func` is about to change."""
        changed = [*written(func, args, kwargs)]
        if func.namespace != "aten" or "batch_norm" in func.name():  # their schema need not name what they change
            changed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for key in {self.key(x) for x in changed} & (self.known.keys() - self.kept.keys()):
            self.kept[key] = [buffer.detach().clone() for buffer in self.known[key]]

    def put_back(self) -> None:
        """Restore the copied tensors to their values before the forward."""
        with torch.no_grad():
            for key, copies in self.kept.items():
                for buffer, was in zip(self.known[key], copies, strict=True):
                    if buffer.shape == was.shape:
                        buffer.copy_(was)


@contextmanager
def undone(module: nn.Module, buffers: SavedBuffers, *, parameters: bool) -> Iterator[None]:
    """Restore Python state, generators, tensors and function caches on exit, so that nothing of a forward remains.

    Above all, tensors of a graph and tensors without data must not remain. Without `parameters`, parameters are not
    saved: the forward must not write to them.
    """
    snapshot = Snapshot.of(module, without=() if parameters else list(module.parameters()))
    buffers.know(snapshot.tensors)
    cached = {id(one): (one, one.cache_info().misses) for one in snapshot.caches}
    with torch.random.fork_rng():
        try:
            with context_kept():
                yield
        finally:
            torch.clear_autocast_cache()  # it may hold weights without numbers
            snapshot.put_back()
            buffers.put_back()
            for one, misses in cached.values():
                if one.cache_info().misses != misses:
                    one.cache_clear()


@contextmanager
def backwards_seen(see: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call `see` with the outputs and inputs of every gradient computation in this context."""
    space: Any = torch.autograd
    real = space._engine_run_backward

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        see(outputs, args[3] if len(args) > 3 else ())
        return real(outputs, *args, **kwargs)

    space._engine_run_backward = run
    try:
        yield
    finally:
        space._engine_run_backward = real
