"""Activation recomputation as an action: a forward that keeps no graph, and the same forward again before its backward.

The first run builds a graph in which no tensor is saved: under no_grad a model may take another path, or a compiled one
be another program, and its numbers would differ. Changes to the module's buffers (running means) and to Python state
(counters, iterators, attributes) count once: the second run starts from their state before the first. BadInput names
other memory that a forward writes to.
Memory: the received tensors, and a copy of the stage's buffers, for every micro-batch that waits for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from gossamer.model.snapshot import Snapshot
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.tensor_copies import Copies
from gossamer.spec.errors import BadInput, bad_input

BufferValues = list[tuple[dict[str, Any], str, Tensor]]  # (dict that holds a buffer, key, saved value)


def nothing_saved() -> saved_tensors_hooks:
    """Return a context in which autograd saves no tensor. A graph built in it cannot run its backward."""
    return saved_tensors_hooks(lambda _: None, _gone)


def _gone(_: None) -> Tensor:
    raise AssertionError("a forward without a graph needs recompute before its backward")


def detached(held: Any) -> Any:
    """Return the same structure with all tensors detached."""
    return tree_map_only(Tensor, Tensor.detach, held)


def copy_buffers(module: nn.Module, names: Collection[str], written: Collection[str] = ()) -> BufferValues:
    """Return copies of the buffers in `names`, and of the attributes and untrained parameters in `written`.

    Names of one tensor share one copy. Raises BadInput if a trained parameter is in `written`.
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
                    raise _written_to(f"the trained parameter {full}")
                found.append((space, name, copies.setdefault(id(tensor), tensor.detach().clone())))
    return found


@contextmanager
def in_place_of(buffers: BufferValues) -> Iterator[None]:
    """Put `buffers` into the module in this context, and put the previous tensors back on exit."""
    had = [(space, name, space[name]) for space, name, _ in buffers]
    for space, name, tensor in buffers:
        space[name] = tensor
    try:
        yield
    finally:
        for space, name, before in had:
            space[name] = before


@dataclass
class LastPython:
    """The last snapshot of a module's Python state, which serves as long as nothing has changed.

    To see that nothing has takes a tenth of the time of another snapshot.
    """

    _last: Snapshot | None = None

    def of(self, module: nn.Module) -> Snapshot:
        """Return a snapshot that equals the present state of `module`, the same one while it stays so."""
        if self._last is not None and self._last.is_current():
            return self._last
        self._last = None  # first: objects that it alone keeps alive would be found again in weak dictionaries
        found = python_of(module)
        self._last = None if found.record.is_fleeting else found
        return found


def once_more(
    forward: Callable[[], Any],
    module: nn.Module,
    buffers: BufferValues,
    python: Snapshot,
    last: LastPython | None = None,
) -> Any:
    """Run `forward` again with the saved `buffers`, which it may change, and the saved Python state; return its result.

    The present Python state and buffers are restored afterwards.
    """
    now = python_of(module) if last is None else last.of(module)
    if python is not now:
        python.put_back()
    try:
        with in_place_of(buffers):
            return forward()
    finally:
        now.put_back()


@dataclass
class InPlaceWrites:
    """A record of the tensors besides buffers that forwards of an unsplit module write in place.

    Known after the first forward.
    """

    names: frozenset[str] | None = None  # of attributes and untrained parameters

    def run(self, forward: Callable[[], Any], module: nn.Module, python: Snapshot) -> tuple[Any, BufferValues]:
        """Run `forward`; return its result, and copies of the module's buffers and written tensors from before.

        Raises BadInput if it writes to a tensor of which there is no copy.
        """
        every = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        buffers = copy_buffers(module, every, self.names or ())
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
def once(module: nn.Module, python: Snapshot, buffers: BufferValues, copies: Copies | None = None) -> Iterator[None]:
    """Run a forward in this context that will be run again.

    Raises BadInput if it writes to a tensor that the second run would find changed.
    """
    copied = {id(space[name]) for space, name, _ in buffers}
    held = (
        x for x in (*python.tensors, *module.parameters()) if id(x) not in copied and not isinstance(x, AbsentTensor)
    )
    versions = [(x, x._version) for x in held]
    yield
    for x, version in versions:
        if x._version != version and (copies is None or copies.of(x) is None or not _is_kept(module, x)):
            name = next((name for name, p in module.named_parameters() if p is x), python.name_of(x))
            raise _written_to(name)


def _is_kept(module: nn.Module, tensor: Tensor) -> bool:
    """Return whether a tensor is an attribute or a parameter of a module."""
    spaces = (space for m in module.modules() for space in (m._parameters, vars(m)))
    return any(held is tensor for space in spaces for held in space.values())


def _written_to(what: str) -> BadInput:
    return bad_input(
        wanted=f"a forward that does not write in place to {what}, as recompute runs the forward twice",
        got="an in-place write",
        do="keep the value in a buffer, or in an attribute of a module that the first forward writes to as well, or "
        "train without recompute (plan.savers, plan.pipeline_schedule)",
        key="plan.savers",
    )


def python_of(module: nn.Module) -> Snapshot:
    """Return a snapshot of the Python state of a module, without its parameters and buffers."""
    return Snapshot.of_python(module, "")
