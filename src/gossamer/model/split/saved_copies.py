"""What a graph keeps of memory that every forward writes to: a copy, as the forward that made the graph had it.

Several micro-batches are between their forward and their backward at once. In one process a backward follows its
forward, and finds a memory bank or a running average as that forward left it; here another forward has been there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gossamer.spec.errors import BadInput, bad_input

_SAID = "modified by an inplace operation"  # by autograd, of what a graph has kept


def copies_of(memory: frozenset[int]) -> saved_tensors_hooks:
    """A graph that is made in here keeps a copy of what lies in `memory`."""

    def keep(x: Tensor) -> Any:
        x = x.detach()
        if memory_of(x) in memory:
            return x.clone(), None
        return x, x._version

    def give(kept: Any) -> Tensor:
        tensor: Tensor = kept[0]
        if kept[1] is not None and tensor._version != kept[1]:
            raise written_meanwhile(f"a tensor {tuple(tensor.shape)}")
        return tensor

    return saved_tensors_hooks(keep, give)


def memory_of_names(module: nn.Module, names: frozenset[str]) -> frozenset[int]:
    """Where the parameters, buffers and attributes with these names lie now."""
    found = set()
    for name in names:
        path, _, attribute = name.rpartition(".")
        held = getattr(module.get_submodule(path), attribute, None)
        if isinstance(held, Tensor) and (key := memory_of(held)):
            found.add(key)
    return frozenset(found)


def memory_of(tensor: Tensor) -> int:
    """The same number for tensors in the same memory; 0 for those without."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


@contextmanager
def refused_by_name() -> Iterator[None]:
    """A backward runs in here: what it needs and a later forward has written is refused. Raises BadInput."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if _SAID not in str(error):
            raise
        raise written_meanwhile(str(error).partition(_SAID)[2].strip(": ").partition(" is at")[0]) from error


def written_meanwhile(what: str) -> BadInput:
    return bad_input(
        wanted="what a backward needs to be as its forward left it, while other micro-batches go forward",
        got=f"{what}, which a forward has written to in place",
        do="keep it in a buffer or an attribute of a module, use a copy of it (clone()), or train without stages",
        key="plan.mesh.pipe",
    )
