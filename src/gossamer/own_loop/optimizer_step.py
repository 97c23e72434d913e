"""The optimizer step as a transaction of all ranks: the user's own optimizer, with a hook before and after each step.

Before: the ranks exchange their position, the norm of `.grad`, the optimizer's settings, and now and then a digest of
the parameters. A difference raises an error before any parameter has moved: gradients that a rank has edited by its own
numbers, a learning rate that follows a rank's own validation loss. If a gradient is not finite, all ranks reject the
step and no parameter moves. After: the pending states of the exchanges are committed. An optimizer that is given a
closure computes its gradients inside of the step: there all of this happens after each evaluation of the closure.

Differences show in a loop's first steps, if ever, so later steps do not wait for the other ranks. The row of such a
step is sent with the next backward pass's status row, and a difference is reported one step late.
"""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.ops.fingerprint import digest
from gossamer.ops.norm import global_norm_squared, scale_
from gossamer.own_loop.backward_passes import BackwardPasses
from gossamer.own_loop.status_rows import LOSS, STEP, TOLD, Deferred, StatusRow
from gossamer.own_loop.untrained_tensors import UntrainedTensors
from gossamer.spec.errors import BadInput, StepRejected, WireMismatch, bad_input

_log = logging.getLogger(__name__)
_SAME = 1e-5  # relative: machines sum in different orders
_SAME_BUFFERS = 1e-6  # relative, of buffers, which are summed in float64
_NAMED = 8  # buffers named in a message
_SHOWN = 1 << 16  # elements sampled of each buffer, about
_DIGEST_BITS = 52
_PARTED = (
    "the parameters differ between ranks before step {step}: code outside the optimizer changes them with values of "
    "one rank. Change parameters outside of optimizer.step() only in the same way on all ranks"
)
_HELD_STEPS = 8  # of later steps, every 8th also compares parameters and buffers
_STRICT_STEPS = 16  # first steps wait for all ranks' rows, later only powers of two


class OptimizerSteps:
    """The step hooks of one optimizer. `passes`: the gradient averaging of the models whose parameters it moves; empty
    if this process is alone.
    """

    def __init__(
        self, optimizer: Optimizer, passes: Sequence[BackwardPasses], clip: float, untrained: UntrainedTensors
    ) -> None:
        """Register the hooks, in place of those of an earlier wrap of the optimizer. `clip`: largest norm of its
        gradients, 0 for none. `untrained`: what else must be equal on all ranks.
        """
        self._all, self._clip = tuple(passes), clip
        self._untrained, self._names = untrained, tuple[str, ...]()  # of those compared last
        self.made = 0
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        optimizer.rejected = 0  # type: ignore[attr-defined]
        _remove_earlier(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @property
    def _passes(self) -> Sequence[BackwardPasses]:
        """Return the passes that still own their parameters; another wrap may have taken them over."""
        return [one for one in self._all if not one.is_closed]

    @property
    def _is_over(self) -> bool:
        """Return whether the models were let go: a step is the optimizer's own again."""
        return bool(self._all) and all(one.is_released for one in self._all)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_over:
            return None
        self._check_scaler(kwargs)
        for one in self._passes:
            one.check_apart(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if whose := self._judge(optimizer, STEP):
                self._reject(optimizer, whose)
            return None
        agreed = self._agreed(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": agreed}
        return (args[0], agreed, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_over:
            return
        rejected = bool(self._kept)
        self._give_back()
        for one in self._passes:
            one.reject(optimizer) if rejected else one.commit(optimizer)
        self.made += 1

    def _judge(self, optimizer: Optimizer, kind: int) -> str:
        """Compare the gradients that the optimizer is about to use with those of the other ranks, and clip them.

        `kind`: of the status row; in a closure (LOSS) ranks always wait for each other. Returns whose gradients are not
        finite, "" if all are.
        """
        self._check_known(optimizer)
        self._check_grouped()
        grads = [p.grad for p in _params(optimizer) if p.grad is not None]
        squared = float(global_norm_squared([_dense(grad) for grad in grads]))
        is_finite = math.isfinite(squared)
        bad: list[int] = []
        if self._passes:
            told = self._told(optimizer, grads, squared)
            if (
                not is_finite
                or self._is_strict
                or kind == LOSS
                or not self._passes[0].defer(Deferred(told, self._comparison))
            ):
                bad = self._checked(optimizer, kind, told)
        if not is_finite:
            return f"of rank {', '.join(map(str, bad))}" if bad else "(rank unknown)"
        if self._clip and (norm := squared**0.5 / _scale_left(optimizer)) > self._clip:
            scale_(grads, self._clip / (norm + 1e-6))
        return ""

    @property
    def _comparison(self) -> Callable[[Tensor], None]:
        """Return the comparison of what ranks tell in this step; it does not keep the passes alive, which keep it."""
        return partial(_compare, step=self.made + 1, names=self._names)

    @property
    def _is_strict(self) -> bool:
        return self.made < _STRICT_STEPS or _is_power_of_two(self.made)

    def _reject(self, optimizer: Optimizer, whose: str) -> None:
        """Reject the step on all ranks: without gradients the optimizer moves no parameter."""
        _log.warning("a gradient %s is not finite: the step is rejected, and no rank updates its parameters", whose)
        optimizer.rejected += 1  # type: ignore[attr-defined]
        self._kept = [(p, p.grad) for p in _params(optimizer) if p.grad is not None]
        for param, _ in self._kept:
            param.grad = None

    def _give_back(self) -> None:
        """Put the gradients of a rejected step back."""
        for param, grad in self._kept:
            param.grad = grad
        self._kept = []

    def _told(self, optimizer: Optimizer, grads: Sequence[Tensor], squared: float) -> tuple[float, ...]:
        """Return the values that must be equal on all ranks when an optimizer steps, (TOLD,)."""
        held, buffers = 0.0, 0.0
        if self._is_strict or self.made % _HELD_STEPS == 0:
            held = float(global_norm_squared([_dense(p.detach()) for p in _params(optimizer)]))
            found = self._untrained.by_name()
            self._names, buffers = tuple(found), _leaning(list(found.values()))
        return squared, float(_settings(optimizer)), held, buffers, _slanted(grads)

    def _checked(self, optimizer: Optimizer, kind: int, told: tuple[float, ...]) -> list[int]:
        """Check that all ranks are in the same state; return the ranks whose own gradients were not finite."""
        first = self._passes[0]
        is_due = _is_power_of_two(self.made)  # parameters: at steps 0, 1, 2, 4, 8, ...
        found = digest([_dense(p.detach()) for p in _params(optimizer)], self.made) % 2**_DIGEST_BITS if is_due else 0
        is_finite = all(one.is_finite(optimizer) for one in self._passes)
        beside = (*told, float(is_finite), float(found))
        rows = first.gathered(StatusRow(kind, first.serial, beside=beside), f"optimizer.step() {self.made + 1}")
        self._comparison(rows.beside[:, :TOLD])
        fine, prints = rows.beside[:, TOLD].tolist(), rows.beside[:, TOLD + 1].tolist()
        if len(set(prints)) > 1:
            raise WireMismatch(_PARTED.format(step=self.made + 1))
        return [rank for rank, fine in enumerate(fine) if not fine]

    def _agreed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose gradients are judged as those of a step without one, and that computes the loss of the
        global batch, as some optimizers decide by it.
        """
        evaluated, is_rejected, before = 0, False, _versions(optimizer)

        def agreed() -> Any:
            nonlocal evaluated, is_rejected
            if is_rejected:
                raise self._stuck(optimizer, "an evaluation after one with a gradient that is not finite")
            loss = closure()
            evaluated += 1
            if whose := self._judge(optimizer, LOSS):
                if evaluated > 1 or _versions(optimizer) != before:
                    raise self._stuck(optimizer, f"a gradient {whose} that is not finite, in evaluation {evaluated}")
                self._reject(optimizer, whose)
                is_rejected = True
            if loss is None or not self._passes:  # a closure need not return one
                return loss
            return self._passes[0].whole(loss)

        return agreed

    def _stuck(self, optimizer: Optimizer, got: str) -> StepRejected:
        """Return the error for a step that can be neither taken nor rejected, after it has given its gradients back."""
        self._give_back()
        for one in self._passes:
            one.reject(optimizer)
        return StepRejected(
            f"optimizer.step(closure) {self.made + 1}: wanted finite gradients in every evaluation of the closure, got "
            f"{got}: the step can be neither taken nor rejected, as the optimizer has begun to move parameters. Go on "
            "from a checkpoint, with a smaller learning rate or a line search"
        )

    def _check_known(self, optimizer: Optimizer) -> None:
        """Raise BadInput if a gradient that would move a parameter is not the mean of all ranks."""
        if not self._all:
            return
        known = {id(param) for one in self._passes for param in one.params.values()}
        before = {id(param) for one in self._all if one.is_closed for param in one.params.values()}
        for index, param in enumerate(_params(optimizer)):
            if param.grad is not None and id(param) not in known:
                if id(param) in before:
                    raise bad_input(
                        wanted="a step of an optimizer that the last gossamer.wrap of its parameters was given",
                        got="one of an earlier gossamer.wrap, which ended when parameters of it were wrapped again",
                        do="pass the models that share parameters, and all optimizers that move them, to one "
                        "gossamer.wrap, as lists",
                        key="optimizer",
                    )
                raise BadInput(
                    f"parameter {index} of the optimizer, of shape {tuple(param.shape)}, was unfrozen or added after "
                    "gossamer.wrap: its gradient is this rank's own, not the mean over ranks. Unfreeze or add it "
                    "before gossamer.wrap, or call gossamer.wrap again"
                )

    def _check_grouped(self) -> None:
        """Raise BadInput if the last pass of a group is still to come; it may be that of the closure."""
        for one in self._passes:
            if one.is_held:
                raise BadInput(
                    "optimizer.step() before the accumulated gradients were averaged: wanted "
                    f"{one.manner.accumulate} backward passes before each step (accumulate=), the last of them outside "
                    "of model.no_sync(). Call step() after that last pass"
                )

    def _check_scaler(self, kwargs: Mapping[str, Any]) -> None:
        """Raise BadInput if gradients have a scale of a GradScaler that is not known: to an exchange with residuals, or
        to clipping, where the optimizer takes the scale away inside of its step.
        """
        if self._clip and kwargs.get("grad_scaler") is not None:
            raise bad_input(
                wanted="an optimizer whose gradients are unscaled before its step, or that is told grad_scale",
                got="one whose step takes grad_scaler=",
                do="leave max_grad_norm out, and call scaler.unscale_(optimizer), then clip_grad_norm_",
                key="max_grad_norm",
            )
        if not any(one.may_keep_residuals and one.manner.scale is None for one in self._passes):
            return
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            if frame.f_code is torch.amp.GradScaler.step.__code__ and frame.f_locals["self"].is_enabled():
                raise BadInput(
                    "the exchange keeps residuals, and a GradScaler changes the scale of the gradients that they are "
                    "added to. Pass the GradScaler to gossamer.wrap as scaler="
                )


def _remove_earlier(optimizer: Optimizer) -> None:
    """Remove the hooks of an earlier wrap, whose clipping and whose gradients are no longer those of the optimizer."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), OptimizerSteps):
                del hooks[key]


def _compare(told: Tensor, step: int, names: Sequence[str]) -> None:
    """Raise WireMismatch if ranks differ. `told` (ranks, TOLD): their values before `step`. `names`: of buffers."""
    squares, settings, held, buffers, slanted = told.unbind(1)
    if len(set(settings.tolist())) > 1:
        raise WireMismatch(
            f"the optimizer's settings differ between ranks at step {step}: set lr and the other settings from "
            "values that are the same on all ranks, e.g. a validation loss averaged over ranks"
        )
    if _differ(held):
        raise WireMismatch(_PARTED.format(step=step))
    if _differ(buffers, _SAME_BUFFERS):
        raise WireMismatch(
            f"the buffers differ between ranks before step {step} ({', '.join(names[:_NAMED])}): a "
            "buffer or frozen parameter is computed from each rank's own rows. Compute it from values that are "
            "the same on all ranks, e.g. averaged over ranks"
        )
    if _differ(squares) or _part(slanted, squares):
        norms = ", ".join(f"{float(one) ** 0.5:.6g} on rank {rank}" for rank, one in enumerate(squares))
        raise WireMismatch(
            f"gradients differ between ranks at optimizer.step() {step} (norms: {norms}). After backward they "
            "were equal on all ranks: change .grad only in the same way on all ranks"
        )


def _scale_left(optimizer: Optimizer) -> float:
    """Return the loss scale that is still in the gradients: a fused optimizer takes it away inside of its step."""
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    scale = getattr(optimizer, "grad_scale", None) if is_fused else None
    return 1.0 if scale is None else float(scale)


def _versions(optimizer: Optimizer) -> list[int]:
    """Return numbers of which one grows whenever a parameter is changed."""
    return [param._version for param in _params(optimizer)]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _differ(squares: Tensor, same: float = _SAME) -> bool:
    """Return whether the squared norms, one per rank, are of different tensors."""
    finite = torch.isfinite(squares)
    if not bool(finite.all()):
        return bool(finite.any())
    return float(squares.max() - squares.min()) > same * float(squares.max())


def _leaning(tensors: Sequence[Tensor]) -> float:
    """Return the squared norm, enlarged by the vector's direction: a rotation of rows with fixed length changes it."""
    if not tensors:
        return 0.0
    found, whole, device = [], 0.0, tensors[0].device
    for index, one in enumerate(tensors):
        flat = _dense(one.detach()).flatten()
        wide, weight = flat[:: max(1, flat.numel() // _SHOWN)].double(), 1.0 + index % 7 / 7
        found.append(torch.stack([wide @ wide, weight * wide.sum()]).to(device))
        whole += weight**2 * wide.numel()
    squared, slanted = map(float, torch.stack(found).sum(0))
    return squared * (2.0 + slanted / math.sqrt(squared * whole)) if squared > 0 else squared


def _slanted(grads: Sequence[Tensor]) -> float:
    """Return a weighted sum of all gradients, which unlike a norm depends on directions."""
    if not grads:
        return 0.0
    device = grads[0].device
    dense = [_dense(grad) for grad in grads]
    kinds = [torch.float64 if one.dtype == torch.float64 else torch.float32 for one in dense]
    sums = [one.sum(dtype=kind).to(device, torch.float64) for one, kind in zip(dense, kinds, strict=True)]
    weights = torch.arange(len(sums), dtype=torch.float64, device=device).remainder_(7.0).div_(7.0).add_(1.0)
    return float(torch.stack(sums) @ weights)


def _part(slanted: Tensor, squares: Tensor) -> bool:
    """Return whether the weighted sums, given the squared norms, are of different tensors."""
    if not bool(torch.isfinite(slanted).all()):
        return False  # reported by the norms
    return float(slanted.max() - slanted.min()) > _SAME * float(squares.max().sqrt() + slanted.abs().max())


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _dense(grad: Tensor) -> Tensor:
    grad = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _settings(optimizer: Optimizer) -> int:
    """Return a 32-bit hash of all numbers and strings in the parameter groups."""
    groups = [[(k, _plain(v)) for k, v in sorted(g.items()) if k != "params"] for g in optimizer.param_groups]
    return zlib.crc32(repr(groups).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (int, float, str, bool, tuple, list, type(None))) else type(value).__name__
