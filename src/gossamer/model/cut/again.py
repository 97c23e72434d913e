"""Recompute as an action: a forward that keeps no graph, and the same forward once more before its backward.

The first run is one with a graph, of which nothing is saved: under no_grad a model may take another way, or a compiled
one be another program, and its numbers would differ. What either run changes of the module's buffers (running means)
and of what Python keeps (counters, iterators) counts once: the second run starts from what they were before the first.
Memory: what was received, and a copy of the stage's buffers, for every micro-batch that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from gossamer.model.snapshot import Snapshot
from gossamer.spec.errors import bad_input

Buffers = list[tuple[dict[str, Any], str, Tensor]]  # where it is kept, its name there, value


def nothing_saved() -> saved_tensors_hooks:
    """A graph that is made in here holds no tensor, and cannot be run."""
    return saved_tensors_hooks(lambda _: None, _gone)


def _gone(_: None) -> Tensor:
    raise AssertionError("a forward without a graph needs recompute before its backward")


def detached(held: Any) -> Any:
    """The same without graphs."""
    return tree_map_only(Tensor, Tensor.detach, held)


def buffers_of(module: nn.Module, names: Collection[str], written: Collection[str] = ()) -> Buffers:
    """Copies of the buffers that are called `names`, and of the attributes and untrained parameters that are called
    `written`; what was one tensor is one copy. Raises BadInput where a trained parameter is.
    """
    copies: dict[int, Tensor] = {}
    found = []
    for path, owner in module.named_modules():
        for space in (owner._buffers, owner._parameters, vars(owner)):
            for name, tensor in space.items():
                full = f"{path}.{name}" if path else name
                if not isinstance(tensor, Tensor) or full not in (names if space is owner._buffers else written):
                    continue
                if tensor.requires_grad:
                    raise bad_input(
                        wanted=f"a forward that leaves {full} alone, which is trained, for it is run again",
                        got="one that writes to it",
                        do="write to what is not trained, or train without the recompute schedule",
                        key="plan.schedule",
                    )
                found.append((space, name, copies.setdefault(id(tensor), tensor.detach().clone())))
    return found


@contextmanager
def in_place_of(buffers: Buffers) -> Iterator[None]:
    """The module has `buffers` in here, and after it what it had before."""
    had = [(space, name, space[name]) for space, name, _ in buffers]
    for space, name, tensor in buffers:
        space[name] = tensor
    try:
        yield
    finally:
        for space, name, before in had:
            space[name] = before


def once_more(forward: Callable[[], Any], module: nn.Module, buffers: Buffers, python: Snapshot) -> Any:
    """What `forward` gives where the module still has `buffers`, which it may change, and Python what it had then."""
    now = python_of(module)
    python.put_back()
    try:
        with in_place_of(buffers):
            return forward()
    finally:
        now.put_back()


def python_of(module: nn.Module) -> Snapshot:
    """What Python holds of a module, without its parameters and buffers."""
    return Snapshot.of_python(module, "")
