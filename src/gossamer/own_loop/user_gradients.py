"""The user's `.grad`: its content before a backward pass is set aside, and the mean of all ranks is added to it.

It lies in the bucket, with no copy. A parameter whose elements lie in another order than its rows (channels_last, a
transposed weight) gets a copy in that order, as autograd gives it one: kernels of fused optimizers walk through the
memory of parameter and gradient side by side, whatever their strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.exchange import has_residual
from gossamer.own_loop.gradient_buckets import LoopBuckets
from gossamer.own_loop.gradient_hooks import DeferredHook


@dataclass(frozen=True, slots=True)
class EarlierGradient:
    """The content of `.grad` before a pass; a copy, if it was in the bucket."""

    gradient: Tensor
    was_view: bool


class UserGradients:
    """The `.grad` of the trained parameters. `held`: parameters with gradients of an unsent group."""

    def __init__(self, buckets: LoopBuckets) -> None:
        self._buckets = buckets
        self.held: set[str] = set()
        self._earlier: dict[str, EarlierGradient] = {}
        self._places: dict[str, Tensor] = {}  # what was `.grad` in the bucket, of gradients that are on their way

    def take(self, name: str) -> None:
        """Take `.grad` away, so that autograd stores a pass's gradient alone; its content is saved, unless it is
        that of the group.
        """
        param = self._buckets.params[name]
        is_view = self._buckets.is_view(name, param.grad)
        if name not in self.held or not is_view:
            self.set_aside(name)
        if is_view and param.grad is not None:
            self._places[name] = param.grad
        param.grad = None

    def give(self, name: str) -> None:
        """Make the bucket `.grad` again, after autograd's gradient was copied to it."""
        param, place = self._buckets.params[name], self._places.pop(name, None)
        param.grad = place
        param.grad = self._buckets.place(name)

    def put(self, name: str, *, had: bool) -> None:
        """Write the mean of one parameter to `.grad`, and add the earlier content.

        A parameter that no rank has a gradient for gets what error feedback owes it, unless it is frozen.
        """
        param, slot = self._buckets.params[name], self._buckets.slot_of(name)
        view, earlier = slot.views[name], self._earlier.pop(name, None)
        if not had and not (param.requires_grad and has_residual(slot.exchange) and bool(view.any())):
            if earlier is None:
                param.grad = None
            elif earlier.was_view:
                view.copy_(earlier.gradient)
                param.grad = self._in_order(name)
            else:
                param.grad = earlier.gradient
            return
        for hook in list((param._backward_hooks or {}).values()):
            if isinstance(hook, DeferredHook):
                mean = view.clone()  # the hook may keep it, or write to it
                changed = hook.on_mean(mean)
                view.copy_(mean if changed is None else changed)
        if earlier is None:
            param.grad = self._in_order(name)
        elif earlier.was_view:
            view.add_(earlier.gradient)
            param.grad = self._in_order(name)
        else:
            param.grad = earlier.gradient.add_(view)  # keep the user's own tensor as `.grad`

    def _in_order(self, name: str) -> Tensor:
        """Return the parameter's place in its bucket, or a copy whose elements lie in the order of the parameter's."""
        param = self._buckets.params[name]
        if not param.is_contiguous():
            copy = torch.empty_like(param.detach())
            if copy.stride() == param.stride():  # else it has gaps, and autograd's gradients have none
                return copy.copy_(self._buckets.slot_of(name).views[name])
        return self._buckets.place(name)

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
