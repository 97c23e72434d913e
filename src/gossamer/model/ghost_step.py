"""The ghost of a micro-batch: its forward and backward pass on tensors without data, and the memory they would take.

The model runs on shapes alone, as in `model_profile`, so the pass takes no memory, whatever the size of the model.
Every new storage counts from the operator that made it until nothing refers to it: what autograd keeps for the backward
pass, and what comes and goes in between (logits and their gradient, most of all).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.flop import flop_of
from gossamer.model.side_effects import untouched
from gossamer.model.split.meta_init import without_storage
from gossamer.model.split.trace_backends import FakeTensorOps, unlogged
from gossamer.process.garbage import uncollected
from gossamer.process.stack_position import unwatched
from gossamer.spec.errors import BadInput

_SMALL = 1 << 20  # bytes
_BEFORE = "(before the units)"
_FLOP_OF_ELEMENT = 50.0  # writing one takes a core about as long as so many flop of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostStep:
    """The bytes of one micro-batch beside parameters and their gradients, by group of units.

    `kept`: what the forward pass keeps for the backward pass; `passing`: what at most comes and goes beside that while
    the group runs, in either pass. `small`: the fraction of what is kept that lies in blocks of less than 1 MiB.
    """

    kept: tuple[int, ...]
    passing: tuple[int, ...]
    small: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGhost:
    """The bytes of one micro-batch unit by unit, in the order of their calls; before them what came first.

    `kept`: from the unit's forward to its backward; what follows a unit counts as its own. `most`: at most while it
    runs, in either pass, beside what the units before it keep. `work`: of its forward, in flop. `peaks`: of each group
    of units, at most while one of them runs, beside what the groups before it keep.
    """

    units: tuple[str, ...]
    kept: tuple[int, ...]
    most: tuple[int, ...]
    work: tuple[float, ...]
    peaks: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Return the bytes at the peak of a model in one group."""
        (found,) = self.peaks
        return found


def ghost_step(
    module: nn.Module,
    run: Callable[[nn.Module], Tensor],
    *,
    groups: Sequence[Collection[str]] = (),
    has_backward: bool = True,
) -> GhostStep:
    """Return the memory of `run`, which calls a module and returns its loss, and of the backward pass after it.

    `groups`: the names of the units of every pipeline stage, in order; empty: the model is one group. The module is
    left as it was. Raises BadInput where shapes alone do not say what the forward does.
    """
    with _shapes_alone(module, has_backward=has_backward) as outline:
        with _Allocations(outline, max(1, len(groups))) as ghost:
            for number, names in enumerate(groups):
                ghost.follow(outline, number, frozenset(names))
            return _made(ghost, outline, run)


def ghost_of_units(
    module: nn.Module,
    run: Callable[[nn.Module], Tensor],
    units: Sequence[str],
    *,
    groups: Sequence[Collection[str]] = (),
) -> UnitGhost:
    """Return what each of `units` takes of the memory of a micro-batch; `run` and `groups` as of `ghost_step`.

    Raises BadInput where shapes alone do not say what the forward does.
    """
    with _shapes_alone(module, has_backward=True) as outline, _UnitAllocations(outline, units, groups) as ghost:
        ghost.follow_units(outline)
        _drop_gradients(outline)
        loss = run(outline)
        kept = tuple(ghost.held)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        there = 1 + len(ghost.order)
        return UnitGhost(
            units=(_BEFORE, *ghost.order),
            kept=kept[:there],
            most=tuple(ghost.above[:there]),
            work=tuple(ghost.work[:there]),
            peaks=tuple(ghost.peaks),
        )


@contextmanager
def _shapes_alone(module: nn.Module, *, has_backward: bool) -> Iterator[nn.Module]:
    with untouched(module), unwatched(), uncollected():  # every rank counts the same
        outline = without_storage(module).train()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(has_backward))
            stack.enter_context(unlogged())
            try:
                yield outline
            except BadInput:
                raise
            except Exception as error:  # whatever a forward does with tensors without data
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                raise BadInput(f"the forward needs values, and not shapes alone ({said})", key="model") from error
            finally:
                torch.clear_autocast_cache()


def _drop_gradients(outline: nn.Module) -> None:
    for parameter in outline.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_dropped)  # type: ignore[no-untyped-call]


def _made(ghost: _Allocations, outline: nn.Module, run: Callable[[nn.Module], Tensor]) -> GhostStep:
    _drop_gradients(outline)
    loss = run(outline)
    kept = tuple(ghost.held)
    small = ghost.small / max(1, sum(kept))
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    passing = tuple(most - there for most, there in zip(ghost.above, kept, strict=True))
    return GhostStep(kept=kept, passing=passing, small=small)


def _dropped(parameter: Tensor) -> None:
    """Drop a gradient that is complete: in training it is added to its bucket, which is counted elsewhere."""
    parameter.grad = None


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs operators on shapes alone, and adds up the storages that are alive."""

    def __init__(self, outline: nn.Module, groups: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = FakeTensorOps(outline)
        self._there: dict[int, weakref.ref[Any]] = {}
        there = [*outline.parameters(), *outline.buffers()]
        self._not_ours = {self._operators.key(tensor) for tensor in there}
        self._group = 0
        self.held, self.above = [0] * groups, [0] * groups
        self.small = 0

    def follow(self, outline: nn.Module, number: int, units: frozenset[str]) -> None:
        """Count for group `number` what is made from the time on at which one of its units begins, in either pass."""
        for name, inner in outline.named_modules():
            if name in units:
                inner.register_forward_pre_hook(partial(self._enter, number))
                inner.register_forward_hook(partial(self._await_backward, number))

    def _await_backward(self, number: int, unit: nn.Module, given: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(partial(self._enter, number))

    def _enter(self, number: int, *_: object) -> None:
        self._group = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = self._operators.run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        key = self._operators.key(tensor)  # of a view of a parameter: that of the parameter
        if key < 0 or key in self._not_ours or key in self._there:
            return
        storage = tensor.untyped_storage()
        size, group = storage.nbytes(), self._group
        self._there[key] = weakref.ref(storage, lambda _: self._gone(key, group, size))
        self.held[group] += size
        self.small += size if size < _SMALL else 0
        self.above[group] = max(self.above[group], sum(self.held[group:]))

    def _gone(self, key: int, group: int, size: int) -> None:
        self._there.pop(key, None)
        self.held[group] -= size
        self.small -= size if size < _SMALL else 0


class _UnitAllocations(_Allocations):  # type: ignore[no-untyped-call]
    """The same by units, which are numbered in the order in which they are first called; 0 is what comes before."""

    def __init__(self, outline: nn.Module, units: Sequence[str], groups: Sequence[Collection[str]]) -> None:
        super().__init__(outline, 1 + len(units))
        self._units, self._groups = units, groups
        self.order: list[str] = []
        self.work = [0.0] * (1 + len(units))
        self.peaks = [0] * max(1, len(groups))
        self._of = [0]  # the group of each unit

    def follow_units(self, outline: nn.Module) -> None:
        """Count for a unit from its forward to the next one's, and from its backward to that of the one before."""
        for name in self._units:
            unit = outline.get_submodule(name)
            unit.register_forward_pre_hook(partial(self._begin, name))
            unit.register_forward_hook(partial(self._end, name))

    def _begin(self, name: str, *_: object) -> None:
        if name not in self.order:
            self.order.append(name)
            self._of.append(next((at for at, names in enumerate(self._groups) if name in names), self._of[-1]))
        self._enter(1 + self.order.index(name))

    def _end(self, name: str, unit: nn.Module, given: Any, output: Any) -> None:
        self._await_backward(1 + self.order.index(name), unit, given, output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            made = sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self.work[self._group] += flop_of(func, args, kwargs or {}, out) + _FLOP_OF_ELEMENT * made
        return out

    def _note(self, tensor: Tensor) -> None:
        super()._note(tensor)
        group = self._of[self._group]
        there = sum(held for held, of in zip(self.held, self._of, strict=False) if of >= group)
        self.peaks[group] = max(self.peaks[group], there)
