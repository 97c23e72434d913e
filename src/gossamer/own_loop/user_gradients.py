"""The user's `.grad`: its content before a backward pass is set aside, and the mean of all ranks is added to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gossamer.exchange import has_residual
from gossamer.own_loop.gradient_buckets import LoopBuckets
from gossamer.own_loop.gradient_hooks import DeferredHook


@dataclass(frozen=True, slots=True)
class EarlierGradient:
    """The content of `.grad` before a pass; a copy, if it was the bucket's own view."""

    gradient: Tensor
    was_view: bool


class UserGradients:
    """The `.grad` of the trained parameters. `held`: parameters with gradients of an unsent group."""

    def __init__(self, buckets: LoopBuckets) -> None:
        self._buckets = buckets
        self.held: set[str] = set()
        self._earlier: dict[str, EarlierGradient] = {}

    def put(self, name: str, *, had: bool) -> None:
        """Write the mean of one parameter to `.grad`, and add the earlier content.

        A parameter that no rank has a gradient for gets what error feedback owes it, unless it is frozen.
        """
        param, slot = self._buckets.params[name], self._buckets.slot_of(name)
        view, earlier = slot.views[name], self._earlier.pop(name, None)
        if not had and not (param.requires_grad and has_residual(slot.exchange) and bool(view.any())):
            if earlier is None:
                param.grad = None
            else:
                param.grad = view.copy_(earlier.gradient) if earlier.was_view else earlier.gradient
            return
        for hook in list((param._backward_hooks or {}).values()):
            changed = hook.on_mean(view) if isinstance(hook, DeferredHook) else None
            if changed is not None:
                view.copy_(changed)
        if earlier is None:
            param.grad = view
        elif earlier.was_view:
            param.grad = view.add_(earlier.gradient)
        else:
            param.grad = earlier.gradient.add_(view)  # keep the user's own tensor as `.grad`

    def set_aside(self, name: str) -> None:
        """Save the content of `.grad` before the bucket is written."""
        grad = self._buckets.params[name].grad
        if grad is None:
            self._earlier.pop(name, None)
            self.held.discard(name)  # the user dropped the group's gradients
        elif not self._buckets.is_view(name, grad):
            self._earlier[name] = EarlierGradient(grad, was_view=False)
            self.held.discard(name)
        elif name not in self.held:
            self._earlier[name] = EarlierGradient(grad.detach().clone(), was_view=True)
