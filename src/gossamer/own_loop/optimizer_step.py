"""The step of an optimizer as a transaction of all ranks: it stays the user's own, with a hook before and one after.

Before: all ranks tell each other where they are, the norm of what `.grad` holds now, the rates and settings of the
optimizer, and now and then a digest of the parameters. What differs is refused before anything moves: gradients that a
rank has edited by numbers of its own, a rate that follows a rank's own validation loss. A gradient that is not finite
is rejected by all of them, and no parameter moves. After: what exchanges carry is theirs.

What differs shows in a loop's first steps, if ever: later ones do not wait for each other. What a rank would have told
goes with the first row of its next backward pass, so what parts then is refused one step late.
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
from gossamer.spec.errors import BadInput, WireMismatch

_log = logging.getLogger(__name__)
_SAME = 1e-5  # squares of norms that differ by less are those of the same numbers, on machines that add otherwise
_SAME_BUFFERS = 1e-6  # the same of buffers, which are added up in float64
_NAMED = 8  # of them, in a message
_SHOWN = 1 << 16  # numbers of each of them that are looked at, or a few more
_DIGEST_BITS = 52
_PARTED = (
    "the parameters differ between ranks before step {step}: something moves them by a rank's own numbers, beside the "
    "optimizer"
)
_HELD_STEPS = 8  # of the others, after so many parameters and buffers are looked at as well
_STRICT_STEPS = 16  # the first ones, and each whose number is a power of two, end once all ranks have agreed


class OptimizerSteps:
    """One optimizer's. `passes`: of the models whose parameters it moves; none where this process is alone."""

    def __init__(
        self, optimizer: Optimizer, passes: Sequence[BackwardPasses], clip: float, buffers: Mapping[str, Tensor]
    ) -> None:
        """`buffers`: what should be the same on all ranks beside the parameters, frozen ones among it."""
        self._all, self._clip = tuple(passes), clip
        self._buffers = dict(buffers)
        self.made = 0
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        optimizer.rejected = 0  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @property
    def _passes(self) -> Sequence[BackwardPasses]:
        """Those that still have their parameters: another wrap may have taken them over."""
        return [one for one in self._all if not one.is_closed]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_known(optimizer)
        self._check_grouped()
        self._check_scaler()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._agree(optimizer)
            return None
        agreed = self._agreed(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": agreed}
        return (args[0], agreed, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rejected, self._kept = self._kept, []
        for param, grad in rejected:
            param.grad = grad
        for one in self._passes:
            one.reject() if rejected else one.commit()
        self.made += 1

    def _agree(self, optimizer: Optimizer) -> None:
        grads = [p.grad for p in _params(optimizer) if p.grad is not None]
        squared = float(global_norm_squared([_dense(grad) for grad in grads]))
        is_finite = math.isfinite(squared)
        bad: list[int] = []
        if self._passes:
            told = self._told(optimizer, grads, squared)
            if (
                not is_finite
                or self._is_strict
                or not self._passes[0].defer(Deferred(told, partial(self._compare, step=self.made + 1)))
            ):
                bad = self._checked(optimizer, STEP, told)
        if not is_finite:
            self._reject(optimizer, bad)
        elif self._clip and squared**0.5 > self._clip:
            scale_(grads, self._clip / (squared**0.5 + 1e-6))

    @property
    def _is_strict(self) -> bool:
        return self.made < _STRICT_STEPS or _is_power_of_two(self.made)

    def _reject(self, optimizer: Optimizer, bad: list[int]) -> None:
        """No rank moves: an optimizer leaves parameters without a gradient as they are."""
        who = f"of rank {', '.join(map(str, bad))}" if bad else "(of which rank is not known)"
        _log.warning("a gradient %s is not finite: no rank updates, the step is rejected", who)
        optimizer.rejected += 1  # type: ignore[attr-defined]
        self._kept = [(p, p.grad) for p in _params(optimizer) if p.grad is not None]
        for param, _ in self._kept:
            param.grad = None

    def _told(self, optimizer: Optimizer, grads: Sequence[Tensor], squared: float) -> tuple[float, ...]:
        """What must be the same on all ranks when an optimizer steps: (TOLD,)."""
        held, buffers = 0.0, 0.0
        if self._is_strict or self.made % _HELD_STEPS == 0:
            held = float(global_norm_squared([_dense(p.detach()) for p in _params(optimizer)]))
            buffers = _leaning(list(self._buffers.values()))
        return squared, float(_settings(optimizer)), held, buffers, _slanted(grads)

    def _checked(self, optimizer: Optimizer, kind: int, told: tuple[float, ...]) -> list[int]:
        """All ranks hold the same; gives the ranks whose own gradients were not finite."""
        first = self._passes[0]
        is_due = _is_power_of_two(self.made)  # parameters: at steps 0, 1, 2, 4, 8, ...
        found = digest([_dense(p.detach()) for p in _params(optimizer)], self.made) % 2**_DIGEST_BITS if is_due else 0
        is_finite = all(one.is_finite for one in self._passes)
        beside = (*told, float(is_finite), float(found))
        rows = first.gathered(StatusRow(kind, first.serial, beside=beside), f"optimizer.step() {self.made + 1}")
        self._compare(rows.beside[:, :TOLD], self.made + 1)
        fine, prints = rows.beside[:, TOLD].tolist(), rows.beside[:, TOLD + 1].tolist()
        if len(set(prints)) > 1:
            raise WireMismatch(_PARTED.format(step=self.made + 1))
        return [rank for rank, fine in enumerate(fine) if not fine]

    def _compare(self, told: Tensor, step: int) -> None:
        """`told` (ranks, TOLD): of all ranks, when they were about to make this step."""
        squares, settings, held, buffers, slanted = told.unbind(1)
        if len(set(settings.tolist())) > 1:
            raise WireMismatch(
                f"the optimizer's settings differ between ranks at step {step}: what sets them, such as a validation "
                "loss, must be the same on all ranks"
            )
        if _differ(held):
            raise WireMismatch(_PARTED.format(step=step))
        if _differ(buffers, _SAME_BUFFERS):
            raise WireMismatch(
                f"the buffers differ between ranks before step {step} ({', '.join([*self._buffers][:_NAMED])}): a "
                "buffer, or a frozen parameter, that is made of a batch is of each rank's own rows, and not what one "
                "process has"
            )
        if _differ(squares) or _part(slanted, squares):
            norms = ", ".join(f"{float(one) ** 0.5:.6g} on rank {rank}" for rank, one in enumerate(squares))
            raise WireMismatch(
                f"gradients differ between ranks at optimizer.step() {step} (norms: {norms}). After backward they "
                "were the same everywhere: what edits them must do the same on all ranks"
            )

    def _agreed(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is that of the whole batch, as an algorithm decides by it."""

        def agreed() -> Any:
            loss = closure()
            if not self._passes:
                return loss
            grads = [p.grad for p in _params(optimizer) if p.grad is not None]
            squared = float(global_norm_squared([_dense(grad) for grad in grads]))
            self._checked(optimizer, LOSS, self._told(optimizer, grads, squared))
            return self._passes[0].whole(loss)

        return agreed

    def _check_known(self, optimizer: Optimizer) -> None:
        """Every gradient that is about to move a parameter is the mean of all ranks."""
        if not self._passes:
            return
        known = {id(param) for one in self._passes for param in one.params.values()}
        for index, param in enumerate(_params(optimizer)):
            if param.grad is not None and id(param) not in known:
                raise BadInput(
                    f"parameter {index} of the optimizer, {tuple(param.shape)}, was unfrozen or added after "
                    "gossamer.wrap: its gradient is this rank's own. Unfreeze it before (what has no gradient stays "
                    "as it is), or wrap again"
                )

    def _check_grouped(self) -> None:
        for one in self._passes:
            if one.is_held:
                raise BadInput(
                    f"optimizer.step() in the middle of a group: wanted {one.manner.accumulate} backward passes before "
                    "it (accumulate=), the last of them outside of no_sync, as it sends the sum of all"
                )

    def _check_scaler(self) -> None:
        """What an exchange keeps for later must have no scale in it."""
        if not any(one.remembers and one.manner.scale is None for one in self._passes):
            return
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            if frame.f_code is torch.amp.GradScaler.step.__code__:
                raise BadInput(
                    "an exchange that keeps residuals under a GradScaler: they would be of another scale than the "
                    "gradients they are added to. Pass scaler= to gossamer.wrap"
                )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _differ(squares: Tensor, same: float = _SAME) -> bool:
    """Whether the squares of norms, one of each rank, are of different tensors."""
    finite = torch.isfinite(squares)
    if not bool(finite.all()):
        return bool(finite.any())
    return float(squares.max() - squares.min()) > same * float(squares.max())


def _leaning(tensors: Sequence[Tensor]) -> float:
    """The square of a norm, made larger by where its vector points: rows of a fixed length have all the same norm."""
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
    """A sum of all gradients, each with a weight of its own: unlike a norm, it sees directions."""
    if not grads:
        return 0.0
    device = grads[0].device
    dense = [_dense(grad) for grad in grads]
    kinds = [torch.float64 if one.dtype == torch.float64 else torch.float32 for one in dense]
    sums = [one.sum(dtype=kind).to(device, torch.float64) for one, kind in zip(dense, kinds, strict=True)]
    weights = torch.arange(len(sums), dtype=torch.float64, device=device).remainder_(7.0).div_(7.0).add_(1.0)
    return float(torch.stack(sums) @ weights)


def _part(slanted: Tensor, squares: Tensor) -> bool:
    """Whether such sums, beside the squares of norms, are of different tensors."""
    if not bool(torch.isfinite(slanted).all()):
        return False  # the norms tell
    return float(slanted.max() - slanted.min()) > _SAME * float(squares.max().sqrt() + slanted.abs().max())


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _dense(grad: Tensor) -> Tensor:
    grad = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _settings(optimizer: Optimizer) -> int:
    """32 bits of everything in the groups that is a number or a word."""
    groups = [[(k, _plain(v)) for k, v in sorted(g.items()) if k != "params"] for g in optimizer.param_groups]
    return zlib.crc32(repr(groups).encode())


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (int, float, str, bool, tuple, list, type(None))) else type(value).__name__
