"""Functions of two heads' logits, a tile of tokens at a time: neither N x V logits is ever held.

    f_i = f(a_i, b_i),    a_i = LogitMap(W_a x_i + c_a),    b_i = LogitMap(W_b y_i + c_b)

Symbols: x, y (N, D) hidden states of a student and a teacher, W (V, D), c (V) their heads; f_i a number by token.
Gradients reach x, W_a and c_a alone; backward computes each tile again, and sums those of the head in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gossamer.ops.cut_cross_entropy import LogitMap

_PLAIN = LogitMap()
ByToken = Callable[[Tensor, slice], Tensor]  # logits (n, V) float32 of the tokens of a slice -> (n,) float32


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of logits that a head would make of `hidden` (N, D); without a `weight`, `hidden` are the logits (N, V).

    `compute`: dtype of the product, None for that of `hidden`; `words`: so many of the first logits count, None: all.
    """

    hidden: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    map: LogitMap = _PLAIN
    compute: torch.dtype | None = None
    words: int | None = None

    @property
    def width(self) -> int:
        """Return the number of logits of a row."""
        made = self.hidden.shape[-1] if self.weight is None else self.weight.shape[0]
        return made if self.words is None else self.words

    def chosen(self, rows: Tensor) -> HeadRows:
        """Return the rows whose numbers are given."""
        return replace(self, hidden=self.hidden.index_select(0, rows))

    def logits(self, rows: slice = slice(None)) -> Tensor:
        """Return the logits of some rows, (n, V), in float32 (float64 of float64)."""
        hidden = self.hidden[rows]
        if self.weight is None:
            made = hidden[:, : self.words]
        else:
            compute = self.compute or hidden.dtype
            weight, bias = self.weight[: self.words], None if self.bias is None else self.bias[: self.words]
            with torch.autocast(hidden.device.type, enabled=False):
                cast = None if bias is None else bias.to(compute)
                made = F.linear(hidden.to(compute), weight.to(compute), cast)
        wide = made if made.dtype is torch.float64 else made.float()
        if self.map == _PLAIN:
            return wide
        wide = wide * self.map.inner
        return torch.tanh(wide) * self.map.outer if self.map.is_capped else wide


def by_token(rows: HeadRows, function: ByToken, *, tile: int) -> Tensor:
    """Return `function` of the logits of every row, (N,) float32, with a graph, at most `tile` rows at a time."""
    found: Tensor = _ByToken.apply(rows.hidden, rows.weight, rows.bias, rows, function, tile)  # type: ignore[no-untyped-call]
    return found


def _tiles(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


class _ByToken(torch.autograd.Function):
    """Values of rows of logits; backward computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: HeadRows,
        function: ByToken,
        tile: int,
    ) -> Tensor:
        head = replace(rows, hidden=hidden, weight=weight, bias=bias)
        found = [function(head.logits(some), some) for some in _tiles(hidden.shape[0], tile)]
        ctx.save_for_backward(hidden, weight, bias)
        ctx.settings = replace(rows, hidden=hidden.new_empty(0), weight=None, bias=None), function, tile
        return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_row: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        settings, function, tile = ctx.settings
        needs = ctx.needs_input_grad
        of_hidden = torch.zeros_like(hidden) if needs[0] else None
        shared = [one for one, need in ((weight, needs[1]), (bias, needs[2])) if one is not None and need]
        sums = [torch.zeros_like(one, dtype=_sum_dtype(one)) for one in shared]
        leaves = {id(one): one.detach().requires_grad_() for one in shared}
        for some in _tiles(hidden.shape[0], tile):
            with torch.enable_grad():
                mine = hidden[some].detach().requires_grad_(needs[0])
                own_weight, own_bias = (leaves.get(id(one), one) for one in (weight, bias))
                head = replace(settings, hidden=mine, weight=own_weight, bias=own_bias)
                values = function(head.logits(), some)
                asked = [*([mine] if needs[0] else []), *leaves.values()]
                made = list(torch.autograd.grad(values, asked, by_row[some], allow_unused=True))
            if of_hidden is not None:
                first = made.pop(0)
                if first is not None:
                    of_hidden[some] = first
            for total, one in zip(sums, made, strict=True):
                if one is not None:
                    total.add_(one)
        each = {id(one): total.to(one.dtype) for one, total in zip(shared, sums, strict=True)}
        return of_hidden, each.get(id(weight)), each.get(id(bias)), None, None, None


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def coarse(logits: Tensor, words: Tensor) -> Tensor:
    """Return logits of the chosen words and of all others as one, (n, k + 1), of logits (n, V) and words (n, k)."""
    others = logits.scatter(1, words, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logits.gather(1, words), others], 1)
