"""BatchNorm whose statistics are those of all ranks' rows, as one process with the global batch has them.

Equations (x_i the rows of all ranks, n of them; G_i = w_r dL_r/dy_i for a row of rank r, whose loss counts w_r):
    mean = sum_i x_i / n;  var = sum_i x_i^2 / n - mean^2                                     (float64, one message)
    dL/dx_i = weight / sqrt(var + eps) (G_i - sum_j G_j / n - xhat_i sum_j G_j xhat_j / n)    (one message)
A rank's backward pass works with dL_r and not with w_r dL_r, so what it gets is divided by w_r again.
Source: Ioffe and Szegedy, arXiv:1502.03167, section 3; the sums over ranks as in torch.nn.SyncBatchNorm, whose ranks
all count the same.

A layer keeps its parameters, buffers, name and place in the model; its class becomes a subclass of what it was, until
the model is wrapped again or let go.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, Message
from gossamer.own_loop.backward_passes import BackwardPasses
from gossamer.spec.errors import bad_input


def with_statistics(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Return, by name, the BatchNorm layers of a model that has parameters to train."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and any(p.requires_grad for p in model.parameters())
    ]


def over_all_ranks(layers: Sequence[tuple[str, _BatchNorm]], passes: BackwardPasses, channel: Channel) -> None:
    """Make the layers' statistics global over all ranks' rows, until the passes are closed. Raises BadInput for a layer
    of an unknown class.
    """
    for name, layer in layers:
        if type(layer) not in _CLASSES:
            raise bad_input(
                wanted=f"BatchNorm1d, 2d or 3d for {name or 'the model'}", got=type(layer).__name__,
                do="use one of them, or batch_norm='rank'", key="batch_norm",
            )  # fmt: skip
        layer.__class__ = _CLASSES[type(layer)]
        ranks = _AllRanks(weakref.ref(passes), channel)
        object.__setattr__(layer, "_ranks", ranks)
        passes.at_close(partial(_restore, weakref.ref(layer), ranks))


def _restore(layer: weakref.ref[_BatchNorm], ranks: _Ranks) -> None:
    """Let a layer whose statistics are over `ranks` take them over this rank's own rows again, as torch does."""
    found = layer()
    if found is not None and getattr(found, "_ranks", None) is ranks:
        found.__class__ = _OWN[type(found)]
        object.__delattr__(found, "_ranks")


class _Ranks(ABC):
    """The ranks over which a layer takes its statistics, as the layer reaches them."""

    @abstractmethod
    def summed(self, mine: Tensor) -> Tensor:
        """Sum a small tensor over ranks in float64."""

    @property
    @abstractmethod
    def counts(self) -> bool:
        """Return whether this rank's rows count; in a batch with fewer rows than ranks some ranks hold a spare row."""

    @abstractmethod
    def weight(self) -> float:
        """Return the weight of this rank's loss in the current pass."""


class _Alone(_Ranks):
    """A rank by itself, as a copy of a layer has it."""

    def summed(self, mine: Tensor) -> Tensor:
        return mine.double().cpu().to(mine.device)

    @property
    def counts(self) -> bool:
        return True

    def weight(self) -> float:
        return 1.0


class _AllRanks(_Ranks):
    """All ranks of the loop. A copy of the layer has none but its own."""

    def __init__(self, passes: weakref.ref[BackwardPasses], channel: Channel) -> None:
        self._passes, self._channel = passes, channel

    def __deepcopy__(self, _: Any) -> _Ranks:
        return _Alone()

    def __reduce__(self) -> tuple[type[_Alone], tuple[()]]:
        return _Alone, ()

    def summed(self, mine: Tensor) -> Tensor:
        if self._passes() is None:  # the model was deleted, and the layer is a part of another one
            return _Alone().summed(mine)
        (sent,) = self._channel.start(Message((mine.double().cpu(),), Collective.SUM)).wait()
        return sent.to(mine.device)

    @property
    def counts(self) -> bool:
        passes = self._passes()
        return passes is None or not passes.hand.is_spare

    def weight(self) -> float:
        passes = self._passes()
        return 1.0 if passes is None else passes.share()


class _Normalize(torch.autograd.Function):
    """Normalize over the rows of all ranks: y = weight xhat + bias; also returns mean, var and n for the running
    averages.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: _Ranks) -> Any:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.double()
        here = float(x.numel() // x.shape[1]) if ranks.counts else 0.0
        sums = torch.cat([x.new_tensor([here], dtype=torch.float64), wide.sum(dims), wide.square().sum(dims)])
        if not here:
            sums = torch.zeros_like(sums)
        total = ranks.summed(sums)
        n, (first, second) = total[0], total[1:].tensor_split(2)
        mean = first / n
        var = (second / n - mean.square()).clamp_min(0.0)
        scale = (var + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        xhat = (wide - mean.view(shape)) * scale.view(shape)
        y = xhat if weight is None else xhat * weight.view(shape)
        y = (y if bias is None else y + bias.view(shape)).to(x.dtype)
        ctx.save_for_backward(xhat, weight, scale, n)
        ctx.ranks, ctx.dims, ctx.has_bias = ranks, dims, bias is not None
        ctx.mark_non_differentiable(mean, var, n)
        return y, mean, var, n

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        xhat, weight, scale, n = ctx.saved_tensors
        dims, shape = ctx.dims, [1, -1] + [1] * (grad.dim() - 2)
        wide = grad.double()
        for_bias, for_weight = wide.sum(dims), (wide * xhat).sum(dims)
        counted = ctx.ranks.weight()
        total = ctx.ranks.summed(torch.cat([for_bias, for_weight]) * counted) if counted else None
        if total is None:
            total = ctx.ranks.summed(torch.zeros_like(torch.cat([for_bias, for_weight])))
            back = torch.zeros_like(wide)
        else:
            mean_g, mean_gx = (total / n / counted).tensor_split(2)
            back = (wide - mean_g.view(shape) - xhat * mean_gx.view(shape)) * scale.view(shape)
        if weight is not None:
            back = back * weight.view(shape)
        to_weight = None if weight is None else for_weight.to(weight.dtype)
        return back.to(grad.dtype), to_weight, for_bias.to(grad.dtype) if ctx.has_bias else None, None, None


def _forward(layer: _BatchNorm, x: Tensor, ranks: _Ranks) -> Tensor:
    """Run one forward pass in training mode and update the running averages as torch.nn does."""
    y, mean, var, n = _Normalize.apply(x, layer.weight, layer.bias, layer.eps, ranks)  # type: ignore[no-untyped-call]
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
            share = layer.momentum
            if share is None:  # a plain average of all batches
                share = 1.0 / float(layer.num_batches_tracked or 1)
            unbiased = var * (n / (n - 1)) if float(n) > 1 else var
            layer.running_mean.mul_(1 - share).add_(share * mean.to(layer.running_mean.dtype))
            layer.running_var.mul_(1 - share).add_(share * unbiased.to(layer.running_var.dtype))
    result: Tensor = y
    return result


def _takes_statistics(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


class BatchNorm1dOverRanks(nn.BatchNorm1d):
    """A BatchNorm1d layer whose training statistics are taken over the rows of all ranks."""

    _ranks: _Ranks

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` by the statistics of all ranks' rows, or by the running averages in evaluation."""
        self._check_input_dim(x)
        return _forward(self, x, self._ranks) if _takes_statistics(self) else super().forward(x)


class BatchNorm2dOverRanks(nn.BatchNorm2d):
    """A BatchNorm2d layer whose training statistics are taken over the rows of all ranks."""

    _ranks: _Ranks

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` by the statistics of all ranks' rows, or by the running averages in evaluation."""
        self._check_input_dim(x)
        return _forward(self, x, self._ranks) if _takes_statistics(self) else super().forward(x)


class BatchNorm3dOverRanks(nn.BatchNorm3d):
    """A BatchNorm3d layer whose training statistics are taken over the rows of all ranks."""

    _ranks: _Ranks

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` by the statistics of all ranks' rows, or by the running averages in evaluation."""
        self._check_input_dim(x)
        return _forward(self, x, self._ranks) if _takes_statistics(self) else super().forward(x)


_CLASSES: dict[type[_BatchNorm], type[_BatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1dOverRanks,
    nn.BatchNorm2d: BatchNorm2dOverRanks,
    nn.BatchNorm3d: BatchNorm3dOverRanks,
    BatchNorm1dOverRanks: BatchNorm1dOverRanks,  # of a copy of a wrapped model
    BatchNorm2dOverRanks: BatchNorm2dOverRanks,
    BatchNorm3dOverRanks: BatchNorm3dOverRanks,
}
_OWN: dict[type[_BatchNorm], type[_BatchNorm]] = {
    BatchNorm1dOverRanks: nn.BatchNorm1d,
    BatchNorm2dOverRanks: nn.BatchNorm2d,
    BatchNorm3dOverRanks: nn.BatchNorm3d,
}
