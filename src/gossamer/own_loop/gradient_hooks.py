"""Hooks of autograd on the trained parameters: before and after each gradient, and at the end of a backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from gossamer.own_loop.losses import BackwardCall
from gossamer.spec.errors import BadInput, bad_input


class PassEvents(Protocol):
    """A receiver of the events of backward passes."""

    def asked(self, asked: BackwardCall) -> None:
        """Receive a backward call that is about to run."""

    def before(self, name: str, gradient: Tensor | None) -> Tensor | None:
        """Receive a gradient that is about to be added; return the one to add in its place, if any."""

    def after(self, name: str, param: Tensor) -> None:
        """Receive a parameter whose gradient has been added."""

    def end(self) -> None:
        """Receive the end of a graph."""

    def close(self) -> None:
        """Receive that another wrap has taken over the parameters."""

    def release(self) -> None:
        """Receive that the parameters are this process's own again."""

    def answered(self, doing: str = "") -> AbstractContextManager[None]:
        """Return the context that names the ranks that are missing in it."""


@dataclass(frozen=True, slots=True)
class LossHook:
    """The callback before a backward call, which still has its losses."""

    passes: weakref.ref[PassEvents]

    def __call__(self, asked: BackwardCall) -> None:
        if (passes := self.passes()) is not None:
            passes.asked(asked)


@dataclass(frozen=True, slots=True)
class BeforeHook:
    """The hook that the engine calls before it adds to a parameter's gradient; torch.autograd.grad never calls it."""

    passes: weakref.ref[PassEvents]
    name: str

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if (passes := self.passes()) is None:
            raise BadInput(
                f"parameter {self.name} got a gradient, but its model that was passed to gossamer.wrap has been "
                "deleted: keep a reference to that model while its parameters are trained"
            )
        with passes.answered():
            changed = passes.before(self.name, gradients[0])
        return None if changed is None else (changed,)


@dataclass(frozen=True, slots=True)
class AfterHook:
    """The hook that the engine calls after it has added to a parameter's gradient."""

    passes: weakref.ref[PassEvents]
    name: str

    def __call__(self, param: Tensor) -> None:
        if (passes := self.passes()) is not None:
            with passes.answered():
                passes.after(self.name, param)


@dataclass(frozen=True)
class PassEnding:
    """The callback that the engine calls after a graph; a graph that fails drops it uncalled."""

    passes: weakref.ref[PassEvents]

    def __call__(self) -> None:
        if (passes := self.passes()) is not None:
            with passes.answered():
                passes.end()


@dataclass(frozen=True, slots=True)
class DeferredHook:
    """A user's hook on a parameter's gradient, deferred until the gradient of the global batch is known.

    Where the passes are no more, it is the user's hook again.
    """

    on_mean: Callable[[Tensor], Tensor | None]
    passes: weakref.ref[PassEvents]

    def __call__(self, gradient: Tensor) -> Tensor | None:
        return None if self.passes() is not None else self.on_mean(gradient)


@dataclass(slots=True)
class GradientHooks:
    """The hooks on the gradients of parameters."""

    _handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _nodes: list[torch.autograd.graph.Node] = field(default_factory=list)
    _params: list[nn.Parameter] = field(default_factory=list)

    def add(self, params: Mapping[str, nn.Parameter], passes: weakref.ref[PassEvents]) -> None:
        """Register the hooks on newly trained parameters. Raises BadInput for one that another wrap has hooks on."""
        for name, param in params.items():
            _refuse_owned(name, param)
            refuse_after_hooks(name, param, 0)
        for name, param in params.items():
            self._hook(name, param, passes)
            self._params.append(param)

    def _hook(self, name: str, param: nn.Parameter, passes: weakref.ref[PassEvents]) -> None:
        with torch.enable_grad():
            node = param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert node is not None
        self._nodes.append(node)  # a parameter holds its node weakly, and a freed node loses its hooks
        self._handles.append(node.register_prehook(BeforeHook(passes, name)))
        self._handles.append(param.register_post_accumulate_grad_hook(AfterHook(passes, name)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all hooks, and give the user's own hooks back."""
        for handle in self._handles:
            handle.remove()
        for param in self._params:
            _restore_hooks(param)
        self._handles, self._nodes, self._params = [], [], []


def close_earlier(params: Iterable[nn.Parameter]) -> None:
    """Close the earlier wraps of parameters that are wrapped again, each as a whole.

    An optimizer that moves what is left of one is refused its next step (see `optimizer_step`).
    """
    for one in _owners(params):
        one.close()


def release(model: nn.Module) -> None:
    """Undo `gossamer.wrap` of a model: its gradients are this process's own again. Nothing to undo is no error."""
    for one in _owners(model.parameters()):
        one.release()


def _owners(params: Iterable[nn.Parameter]) -> list[PassEvents]:
    """Return the passes that have hooks on any of the parameters, each once. Hooks of deleted ones are removed."""
    found: dict[int, PassEvents] = {}
    for param in params:
        hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        for key, hook in list((hooks or {}).items()):
            if not isinstance(hook, AfterHook):
                continue
            if (passes := hook.passes()) is None:
                del hooks[key]
            else:
                found[id(passes)] = passes
    return list(found.values())


def _refuse_owned(name: str, param: nn.Parameter) -> None:
    """Raise BadInput for a parameter that another wrap averages: it was unfrozen or given to an optimizer since."""
    if _owners([param]):
        raise bad_input(
            wanted="each parameter in one gossamer.wrap",
            got=f"parameter {name} in two of them: it was unfrozen, or given to an optimizer, after the first one",
            do="pass the models that share parameters, and their optimizers, to one gossamer.wrap, as lists",
            key="model",
        )


def refuse_after_hooks(name: str, param: Tensor, ours: int) -> None:
    """Raise BadInput if a parameter has more hooks after its gradient than `ours`."""
    if len(param._post_accumulate_grad_hooks or ()) > ours:  # type: ignore[attr-defined]
        raise BadInput(
            f"parameter {name} has a hook set by register_post_accumulate_grad_hook, which would see this rank's "
            "own gradient: remove the hook, and change .grad after backward(), when it is the mean over ranks"
        )


def defer_hooks(param: nn.Parameter, passes: weakref.ref[PassEvents]) -> None:
    """Defer the user's hooks on a parameter's gradient, which would see this rank's own."""
    hooks = param._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if not isinstance(hook, DeferredHook):
            hooks[key] = DeferredHook(hook, passes)  # type: ignore[index]
        elif hook.passes is not passes and hook.passes() is not passes():
            hooks[key] = DeferredHook(hook.on_mean, passes)  # type: ignore[index]


def _restore_hooks(param: nn.Parameter) -> None:
    """Put the user's hooks on a parameter's gradient back in the place of the deferred ones."""
    hooks = param._backward_hooks
    for key, hook in list(hooks.items()) if hooks else ():
        if isinstance(hook, DeferredHook):
            hooks[key] = hook.on_mean  # type: ignore[index]
