"""Recompute as an action: a forward that keeps no graph, and the same forward once more before its backward.

The first run is one with a graph, of which nothing is saved: under no_grad a model may take another way, or a compiled
one be another program, and its numbers would differ. What either run changes of the module's buffers (running means)
and of what Python keeps (counters, iterators, attributes) counts once: the second run starts from what they were before
the first. What it writes to in other places is refused by name.
Memory: what was received, and a copy of the stage's buffers, for every micro-batch that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from gossamer.model.snapshot import Copies, Snapshot
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.spec.errors import BadInput, bad_input

BufferNames = list[tuple[dict[str, Any], str, Tensor]]  # where it is kept, its name there, value


def nothing_saved() -> saved_tensors_hooks:
    """A graph that is made in here holds no tensor, and cannot be run."""
    return saved_tensors_hooks(lambda _: None, _gone)


def _gone(_: None) -> Tensor:
    raise AssertionError("a forward without a graph needs recompute before its backward")


def detached(held: Any) -> Any:
    """The same without graphs."""
    return tree_map_only(Tensor, Tensor.detach, held)


def buffers_of(module: nn.Module, names: Collection[str], written: Collection[str] = ()) -> BufferNames:
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
                    raise _written_to(f"{full} alone, which is trained")
                found.append((space, name, copies.setdefault(id(tensor), tensor.detach().clone())))
    return found


@contextmanager
def in_place_of(buffers: BufferNames) -> Iterator[None]:
    """The module has `buffers` in here, and after it what it had before."""
    had = [(space, name, space[name]) for space, name, _ in buffers]
    for space, name, tensor in buffers:
        space[name] = tensor
    try:
        yield
    finally:
        for space, name, before in had:
            space[name] = before


def once_more(forward: Callable[[], Any], module: nn.Module, buffers: BufferNames, python: Snapshot) -> Any:
    """What `forward` gives where the module still has `buffers`, which it may change, and Python what it had then."""
    now = python_of(module)
    python.put_back()
    try:
        with in_place_of(buffers):
            return forward()
    finally:
        now.put_back()


@dataclass
class InPlaceWrites:
    """What the first runs of one whole module write to in place, beside its buffers. Known after the first of them."""

    names: frozenset[str] | None = None  # of attributes and untrained parameters

    def run(self, forward: Callable[[], Any], module: nn.Module, python: Snapshot) -> tuple[Any, BufferNames]:
        """What `forward` gives, and what it found. Raises BadInput where it writes to what nobody has a copy of."""
        every = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        buffers = buffers_of(module, every, self.names or ())
        others = [x for x in python.tensors if not x.requires_grad]
        others += [p for p in module.parameters() if not p.requires_grad]
        lazily = Copies(others if self.names is None and not python.is_compiled else ())
        with once(module, python, buffers, lazily), lazily.watching() if lazily.tensors else nullcontext():
            result = forward()
        if self.names is None:
            found = [*_copied(module, lazily)]
            self.names, buffers = frozenset(name for name, _ in found), buffers + [one for _, one in found]
        return result, buffers


def _copied(module: nn.Module, copies: Copies) -> Iterator[tuple[str, tuple[dict[str, Any], str, Tensor]]]:
    for path, owner in module.named_modules():
        for space in (owner._parameters, vars(owner)):
            for name, held in space.items():
                if isinstance(held, Tensor) and (was := copies.of(held)) is not None:
                    yield f"{path}.{name}" if path else name, (space, name, was)


@contextmanager
def once(module: nn.Module, python: Snapshot, buffers: BufferNames, copies: Copies | None = None) -> Iterator[None]:
    """A forward that is run again runs in here. Raises BadInput where it writes to what the second finds changed."""
    copied = {id(space[name]) for space, name, _ in buffers}
    held = (
        x for x in (*python.tensors, *module.parameters()) if id(x) not in copied and not isinstance(x, AbsentTensor)
    )
    versions = [(x, x._version) for x in held]
    yield
    for x, version in versions:
        if x._version != version and (copies is None or copies.of(x) is None or not _is_kept(module, x)):
            name = next((name for name, p in module.named_parameters() if p is x), python.name_of(x))
            raise _written_to(f"{name} alone, or writes to it, as an attribute, from the beginning")


def _is_kept(module: nn.Module, tensor: Tensor) -> bool:
    """Whether it is an attribute or a parameter."""
    spaces = (space for m in module.modules() for space in (m._parameters, vars(m)))
    return any(held is tensor for space in spaces for held in space.values())


def _written_to(what: str) -> BadInput:
    return bad_input(
        wanted=f"a forward that leaves {what}, for it is run again",
        got="one that writes to it in place",
        do="keep it in a buffer, or train without the recompute schedule",
        key="plan.schedule",
    )


def python_of(module: nn.Module) -> Snapshot:
    """What Python holds of a module, without its parameters and buffers."""
    return Snapshot.of_python(module, "")
