"""Copies of tensors that a graph saves from memory that every forward writes to.

Several micro-batches are between their forward and their backward at once. In one process a backward follows its
forward, and finds a memory bank or a running average as that forward left it. In a pipeline, later forwards have
written to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gossamer.model.split.split_error import split_error
from gossamer.spec.errors import BadInput

_SAID = "modified by an inplace operation"  # part of autograd's error for a saved tensor


def copies_of(memory: frozenset[int]) -> saved_tensors_hooks:
    """Return a context in which autograd saves a copy of each tensor that lies in `memory`.

    The backward raises BadInput if another saved tensor was written in place since.
    """

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
    """Return the memory in which the parameters, buffers and attributes with these names lie now."""
    found = set()
    for name in names:
        path, _, attribute = name.rpartition(".")
        held = getattr(module.get_submodule(path), attribute, None)
        if isinstance(held, Tensor) and (key := memory_of(held)):
            found.add(key)
    return frozenset(found)


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same memory; 0 for tensors without memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


@contextmanager
def refused_by_name() -> Iterator[None]:
    """Run a backward in this context. Raises BadInput, naming the tensor, if a later forward wrote to a saved one."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if _SAID not in str(error):
            raise
        raise written_meanwhile(str(error).partition(_SAID)[2].strip(": ").partition(" is at")[0]) from error


def written_meanwhile(what: str) -> BadInput:
    """Return the BadInput for a tensor (`what`) that a backward needs and a later forward wrote in place."""
    return split_error(
        wanted="no in-place write to a tensor that a backward still needs, while other micro-batches run forward",
        got=f"{what}, which a later forward has written in place",
        do=lambda say: f"keep it in a buffer or an attribute of a module, use a copy of it (clone()), or {say.whole}",
    )
