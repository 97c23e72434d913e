"""The head of a model whose logits are cut: found, watched at its product, and its cross-entropy computed in tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from gossamer.ops import cut_cross_entropy as cut
from gossamer.ops.cut_cross_entropy import HeadLoss, LogitMap
from gossamer.saver.head.unmade_logits import Product, UnmadeLogits
from gossamer.spec.errors import BadInput, bad_input

By = Literal["tiles", "torch", "liger"]

_KEY = "plan.savers"
_WITHOUT = "leave cut_cross_entropy out of plan.savers"
_ROWS, _WORDS = 32, 8192  # of the head, that the first loss in a stage is compared on


@dataclass(slots=True)
class CutHead:
    """A head in use. `losses`: cross-entropies computed without logits; `made`: what asked for logits in training.

    `compares`: whether the next loss in training is compared with the plain one, on some of its rows and words;
    `refuses`: whether logits that are asked for before it are an error.
    """

    head: nn.Linear
    by: By
    in_forward: bool
    filter: float
    is_outline: bool
    compares: bool = False
    refuses: bool = False
    losses: int = 0
    made: list[str] = field(default_factory=list)

    def product(self, hidden: Tensor) -> UnmadeLogits:
        """Return the head's output for `hidden` (*, D)."""
        device, weight = hidden.device.type, self.head.weight
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        return UnmadeLogits.of(Product(hidden, weight, self.head.bias, compute, self._loss, self._lse, self._heard))

    def _heard(self, why: str) -> None:
        if self.head.training and why not in self.made:
            self.made.append(why)
        if self.head.training and torch.is_grad_enabled() and self.refuses and not self.is_outline:
            raise needed_otherwise([why])

    def _lse(self, logits: UnmadeLogits) -> Tensor:
        product, rows = logits.product, logits.hidden.reshape(-1, logits.hidden.shape[-1])
        none = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
        _, lse = cut.token_losses(rows, product.weight, none, product.bias, head=self._settings(logits))
        self.losses += 1
        return lse.view(logits.hidden.shape[:-1]).to(logits.dtype)

    def _loss(self, logits: UnmadeLogits, labels: Tensor, reduction: Any, ignore: int) -> Tensor:
        product, settings = logits.product, self._settings(logits)
        is_training = self.head.training and torch.is_grad_enabled()
        if self.compares and is_training and not self.is_outline:
            self.compares = False
            self._compare(logits, labels, ignore)
            self.refuses = False
        self.losses += 1
        return self._cut((logits.hidden, product.weight, product.bias), labels, reduction, ignore, settings)

    def _settings(self, logits: UnmadeLogits) -> HeadLoss:
        return HeadLoss(
            logits=logits.map, compute=logits.product.compute, filter=self.filter, is_outline=self.is_outline
        )

    def _cut(
        self,
        of: tuple[Tensor, Tensor, Tensor | None],
        labels: Tensor,
        reduction: Any,
        ignore: int,
        settings: HeadLoss,
    ) -> Tensor:
        rows, weight, bias = of
        if self.by == "torch" and settings.logits == LogitMap():
            return by_torch(rows, weight, labels, bias, reduction, ignore, settings)
        if self.by == "liger":
            return _by_liger(rows, weight, labels, bias, reduction, ignore, settings)
        return cut.cut_cross_entropy(
            rows,
            weight,
            labels,
            bias,
            reduction=reduction,
            ignore_index=ignore,
            in_forward=self.in_forward,
            head=settings,
        )

    def _compare(self, logits: UnmadeLogits, labels: Tensor, ignore: int) -> None:
        """Compare loss and gradients with the plain way. Raises BadInput where they differ."""
        product = logits.product
        chosen = (labels != ignore).nonzero().squeeze(1)[:_ROWS]
        words = min(_WORDS, product.weight.shape[0])
        bias = None if product.bias is None else product.bias.detach()[:words]
        given = [logits.hidden.detach()[chosen], product.weight.detach()[:words], *([] if bias is None else [bias])]
        some = labels[chosen].remainder(words)
        settings = self._settings(logits)

        def gradients(loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> list[Tensor]:
            leaves = [one.clone().requires_grad_() for one in given]
            # Hooks of a forward whose graph is thrown away would throw these tensors away, too.
            with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
                value = loss(leaves[0], leaves[1], leaves[2] if bias is not None else None)
                return [value.detach(), *torch.autograd.grad(value, leaves)]

        plain = gradients(lambda h, w, b: F.cross_entropy(plain_logits(h, w, b, settings), some))
        ours = gradients(lambda h, w, b: self._cut((h, w, b), some, "mean", ignore, settings))
        if said := unequal(dict(enumerate(plain)), dict(enumerate(ours)), tolerance_of(product.compute), self.filter):
            raise refused(f"a loss or gradients that differ from the plain ones: {said}")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class HeadWatch:
    """The forward of a head that returns `UnmadeLogits`: what wraps the head's own forward runs as before."""

    def __init__(self, cut_head: CutHead) -> None:
        self.cut_head, self.is_on = cut_head, True
        head = cut_head.head
        self._is_of_class = "forward" not in vars(head)
        self.real: Callable[..., Any] = head.forward
        head.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _AtProduct(self.cut_head) if self.is_on else nullcontext():
            return self.real(*args, **kwargs)

    def remove(self) -> None:
        """Give the head its forward back. One that was wrapped again since stays, but does nothing."""
        head, self.is_on = self.cut_head.head, False
        if vars(head).get("forward") is not self:
            return
        if self._is_of_class:
            del head.forward
        else:
            head.forward = self.real  # type: ignore[method-assign]


class _AtProduct(TorchFunctionMode):
    """Returns `UnmadeLogits` for the product of a head."""

    def __init__(self, cut_head: CutHead) -> None:
        super().__init__()
        self.cut_head = cut_head

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) > 1 and args[1] is self.cut_head.head.weight:
            return self.cut_head.product(args[0])
        return func(*args, **(kwargs or {}))


def head_of(module: nn.Module) -> tuple[str, nn.Linear]:
    """Return the head of a model by name: its output embeddings, or else its last linear module. Raises BadInput."""
    whole = getattr(module, "_orig_mod", module)
    declared = getattr(whole, "get_output_embeddings", None)
    found = declared() if callable(declared) else None
    names = {id(one): name for name, one in whole.named_modules()}
    if found is None:
        linear = [one for one in whole.modules() if isinstance(one, nn.Linear)]
        found = linear[-1] if linear else None
    if type(found) is not nn.Linear or "weight" not in found._parameters:
        at = names.get(id(found), "")
        raise refused("no linear module" if found is None else f"{at or 'a head'} of class {type(found).__name__}")
    real: Any = found.forward
    while real is not None and not hasattr(real, "_torchdynamo_orig_callable"):
        real = getattr(real, "real", None)
    if real is not None:
        raise refused(f"{names[id(found)]}, which torch.compile has compiled")
    return names[id(found)], found


def refused(got: str) -> BadInput:
    """Return the error of a model whose loss cannot be cut."""
    return bad_input(
        wanted="a model whose logits come from one nn.Linear and are read by one cross-entropy alone, which "
        "cut_cross_entropy computes in tiles",
        got=got,
        do=_WITHOUT,
        key=_KEY,
    )


def needed_otherwise(by: Sequence[str]) -> BadInput:
    """Return the error of a model whose logits something else needs."""
    return refused(f"logits that are needed otherwise, too (by {', '.join(by)})")


def plain_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadLoss) -> Tensor:
    """Return the logits (N, V) in float32 by the plain way."""
    compute = settings.compute or hidden.dtype
    x = F.linear(hidden.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).float()
    x, map = x * settings.logits.inner, settings.logits
    return torch.tanh(x) * map.outer if map.is_capped else x


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far apart, relative to the largest, equal gradients may be in this dtype."""
    return 1e-5 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps


def unequal(plain: Mapping[Any, Tensor], ours: Mapping[Any, Tensor], tolerance: float, filter: float) -> str:
    """Return what differs, by name, and by how much; "" for nothing. The first of each is the loss.

    A gradient may differ by `tolerance` of its own largest element, and a tenth of that of the largest of all: some
    are zero but for rounding. A filter may leave out gradients: then the loss alone counts.
    """
    most = max((float(one.abs().max()) for one in list(plain.values())[1:] if one.numel()), default=0.0)
    for at, (name, wanted) in enumerate(plain.items()):
        if (at and filter) or not wanted.numel():
            continue
        scale = float(wanted.abs().max()) + (0.1 * most if at else 0.0)
        gap = float((ours[name].float() - wanted.float()).abs().max())
        if not gap <= tolerance * max(scale, 1e-30):
            what = "the loss" if not at else f"the gradient of {name}"
            return f"{what} by {gap:.2g}, of {scale:.2g}"
    return ""


def by_torch(
    rows: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str, ignore: int, settings: HeadLoss
) -> Tensor:
    """Return the loss of torch's own chunked `linear_cross_entropy`, which makes gradients in forward."""
    compute = settings.compute or rows.dtype
    # Its own choice of chunks, a few tokens each, takes ten times as long as the plain loss on a CPU.
    chunk = max(1, cut.KEPT // weight.shape[0])
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)
    return F.linear_cross_entropy(
        rows.to(compute),
        weight.to(compute),
        labels,
        linear_bias=None if bias is None else bias.to(compute),
        reduction=reduction,
        ignore_index=ignore,
        options=options,
    ).float()


def _by_liger(
    rows: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str, ignore: int, settings: HeadLoss
) -> Tensor:
    """Return the loss of Liger's fused kernel (CUDA). It has never run in this project's tests."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    map, compute = settings.logits, settings.compute or rows.dtype
    if map.is_capped and map.inner * map.outer != 1.0:
        raise refused("a soft cap with a scale of its own, which Liger does not compute")
    fused = LigerFusedLinearCrossEntropyLoss(
        ignore_index=ignore, reduction=reduction, softcap=map.outer if map.is_capped else None
    )
    scaled = rows if map.is_capped else rows * map.inner
    loss: Tensor = fused(weight.to(compute), scaled.to(compute), labels, bias)
    return loss
