"""Cut cross-entropy: loss and gradients of a large-vocabulary head without its logits, one tile of them at a time.

    x_iv = e_i . c_v + b_v,    z = LogitMap(x),    loss_i = lse_i - z_iy,    lse_i = log sum_v exp(z_iv)
    d loss_i / d z_iv = p_iv - [v = y],    p_iv = exp(z_iv - lse_i)

Symbols: e (N, D) hidden states, c (V, D) and b (V) the head, y (N) labels. A tile is some tokens by some words.
A row keeps its maximum m and the sum s of exp(z - m), never m + log s: at logits around 1e4 the sum of both has lost
the digits that the difference to a logit needs. What the label contributes (-1) is added as rows of c and e.
Sums over tiles are float32, whatever the matrix products are computed in.

Two ways to the gradients:
- `token_losses`: backward computes each tile again. One third more matrix products, N floats kept. Loss of every token
  and its log-sum-exp, with gradients of both.
- `cut_cross_entropy(in_forward=True)`: a block of tokens by all words is kept until its gradients are made, within
  forward; backward scales them. No product is computed twice; one backward per forward.

The filter leaves words out of a tile whose probability is below `filter` for all its tokens. It is biased where most
probabilities are about 1/V: at the start of training most of what pushes logits down would be lost. For trained models.
E. Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, https://arxiv.org/abs/2411.09009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

IGNORE = -100
_TILE = 1 << 20  # logits of a tile: 4 MiB in float32, which a cache holds
_TOKENS = 1024  # of a tile, at most: longer ones leave too few words for a good matrix product
KEPT = 1 << 25  # logits that gradients in forward keep: 128 MiB in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMap:
    """What a model does to its head's output: z = outer tanh(inner x) where `is_capped`, else z = inner x."""

    inner: float = 1.0
    is_capped: bool = False
    outer: float = 1.0

    def scaled(self, factor: float) -> LogitMap:
        """Return the map whose result is `factor` times this one's."""
        if self.is_capped:
            return LogitMap(inner=self.inner, is_capped=True, outer=self.outer * factor)
        return LogitMap(inner=self.inner * factor)

    def capped(self) -> LogitMap:
        """Return the map with a tanh after it. Only one is possible."""
        assert not self.is_capped, "one tanh"
        return LogitMap(inner=self.inner, is_capped=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """The words that one rank's head has: those from `first` on. `maximum`, `total`: reduce a tensor in place over all
    ranks that share the vocabulary. Labels are numbers of the whole vocabulary.
    """

    first: int
    maximum: Callable[[Tensor], None]
    total: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """The settings of a cut cross-entropy.

    `compute`: dtype of the matrix products, None for that of the hidden states; `filter`: smallest probability that has
    a gradient, 0 for all; `tile`: tokens and words of a tile, None for sizes that fit a cache; `kept`: logits that
    gradients in forward keep at most; `is_outline`: tensors have shapes alone, so that labels cannot be read, and all
    are taken for valid.
    """

    logits: LogitMap = LogitMap()
    compute: torch.dtype | None = None
    filter: float = 0.0
    tile: tuple[int, int] | None = None
    kept: int = KEPT
    shard: VocabularyShard | None = None
    is_outline: bool = False


_PLAIN = HeadLoss()


def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, head: HeadLoss = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-sum-exp of each row of hidden (N, D), both (N,) float32, with gradients of both.

    weight (V, D), bias (V); labels (N,) int64, all of them valid. Gradients are computed again in backward. Raises
    IndexError for a label without a logit.
    """
    _check_labels(labels, weight.shape[0], head)
    losses, lse = _Recomputed.apply(hidden.to(head.compute or hidden.dtype), weight, bias, labels, head)  # type: ignore[no-untyped-call]
    return losses, lse


def cut_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = IGNORE,
    in_forward: bool = False,
    head: HeadLoss = _PLAIN,
) -> Tensor:
    """Return the cross-entropy of hidden (N, D) @ weight (V, D)^T + bias with labels (N,), as `F.cross_entropy` does.

    Rows whose label is `ignore_index` are left out before anything is computed. `in_forward`: gradients are made in
    forward, where the reduction gives one number and the head is whole; the graph has one backward then.
    """
    valid = None if head.is_outline else (labels != ignore_index).nonzero().squeeze(1)
    if valid is None or valid.numel() == labels.numel():
        rows, targets, is_whole = hidden, labels, True
    else:
        rows, targets, is_whole = hidden.index_select(0, valid), labels.index_select(0, valid), False
    count = targets.numel()
    if in_forward and reduction != "none" and head.shard is None and torch.is_grad_enabled():
        _check_labels(targets, weight.shape[0], head)
        scale = 1.0 / max(count, 1) if reduction == "mean" else 1.0
        total: Tensor = _InForward.apply(rows.to(head.compute or rows.dtype), weight, bias, targets, scale, head)  # type: ignore[no-untyped-call]
        return total if count or reduction == "sum" else total / 0  # a mean over nothing: nan, as the plain loss
    losses, _ = token_losses(rows, weight, targets, bias, head=head)
    if reduction == "none":
        return losses if valid is None or is_whole else losses.new_zeros(labels.shape).index_copy(0, valid, losses)
    return losses.sum() / count if reduction == "mean" and count else losses.sum() / (1 if reduction == "sum" else 0)


def plain_bytes(tokens: int, words: int, itemsize: int) -> int:
    """Return the bytes that the plain loss holds at its peak: the logits in `itemsize` bytes a number, their
    log-softmax and its gradient in float32, and the float32 copy of logits that are narrower.
    """
    return tokens * words * (8 + (4 if itemsize == 4 else 4 + itemsize))


def cut_bytes(tokens: int, words: int, *, in_forward: bool, makes_weight: bool, head: HeadLoss = _PLAIN) -> int:
    """Return the bytes that the cut loss holds at its peak besides the gradients of the hidden states and the head."""
    n, w = _block(tokens, words, head, in_forward=in_forward, makes_weight=makes_weight)
    kept = n * words if in_forward and makes_weight else n * w
    return 4 * (kept + (n * w if head.logits.is_capped else 0) + 4 * tokens)


def _check_labels(labels: Tensor, words: int, head: HeadLoss) -> None:
    if head.shard is not None or head.is_outline or not labels.numel():
        return
    if int(labels.min()) < 0 or int(labels.max()) >= words:
        wrong = labels[(labels < 0) | (labels >= words)][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds.")  # the words of F.cross_entropy


def _block(
    tokens: int, words: int, head: HeadLoss, *, in_forward: bool = False, makes_weight: bool = True
) -> tuple[int, int]:
    """Return the tokens and the words of a tile."""
    if head.tile is not None:
        return max(1, min(tokens, head.tile[0])), min(words, head.tile[1])
    n = max(1, min(tokens, _TOKENS))
    if in_forward and makes_weight:
        n = max(1, min(n, head.kept // words))
    return n, min(words, max(256, _TILE // n))


def _spans(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


class _Tiles:
    """Computes tiles of logits into storage of its own."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadLoss, n: int, w: int) -> None:
        self.hidden, self.weight, self.bias, self.map = hidden, weight, bias, head.logits
        self.sums = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        # fp16 has too few exponents for the rows of a gradient that is not scaled yet
        self.products = torch.float32 if hidden.dtype is torch.float16 else hidden.dtype
        self._narrow = None if hidden.dtype is self.sums else hidden.new_empty(n * w)
        self._caps = hidden.new_empty(n * w if self.map.is_capped else 0, dtype=self.sums)

    def room(self, n: int, w: int) -> Tensor:
        """Return storage for a tile."""
        return self.hidden.new_empty(n * w, dtype=self.sums)

    def words(self, words: slice) -> Tensor:
        """Return rows of the head in the dtype of the matrix products."""
        return self.weight[words].to(self.hidden.dtype)

    def logits(self, rows: slice, words: slice, columns: Tensor, room: Tensor) -> Tensor:
        """Return the logits of a tile, in `room`; `columns`: the head's rows `words`."""
        hidden = self.hidden[rows]
        shape = hidden.shape[0], columns.shape[0]
        out = room[: shape[0] * shape[1]].view(shape)
        made = out if self._narrow is None else self._narrow[: out.numel()].view(shape)
        inner = self.map.inner
        if self.bias is None:
            torch.addmm(made.new_zeros(()), hidden, columns.t(), beta=0, alpha=inner, out=made)
        else:
            shift = self.bias[words].to(hidden.dtype)
            torch.addmm(shift, hidden, columns.t(), beta=inner, alpha=inner, out=made)
        if made is not out:
            out.copy_(made)
        if self.map.is_capped:
            caps = self._caps[: out.numel()].view(shape)
            torch.tanh(out, out=caps)
            torch.mul(caps, self.map.outer, out=out)
        return out

    def through_map(self, tile: Tensor) -> Tensor:
        """Multiply the probabilities of the tile made last by the map's derivative at its logits, but for `slope`."""
        if self.map.is_capped:
            caps = self._caps[: tile.numel()].view(tile.shape)
            tile.addcmul_(tile, caps.square_(), value=-1)
        return tile

    @property
    def slope(self) -> float:
        """Return the map's derivative at logit 0."""
        return self.map.inner * (self.map.outer if self.map.is_capped else 1.0)

    def slope_at(self, z: Tensor) -> Tensor:
        """Return the map's derivative where its result is `z`."""
        slope = torch.full_like(z, self.slope)
        return slope.mul_(1 - (z / self.map.outer).square_()) if self.map.is_capped else slope


@dataclass(slots=True)
class _Rows:
    """Running sums of rows of logits: the largest, the sum of exp(z - largest), the label's logit (0 if elsewhere)."""

    largest: Tensor
    total: Tensor
    target: Tensor

    @staticmethod
    def of(labels: Tensor, dtype: torch.dtype) -> _Rows:
        zeros = torch.zeros(labels.shape, dtype=dtype, device=labels.device)
        return _Rows(torch.full_like(zeros, -torch.inf), zeros, zeros.clone())

    def take(self, rows: slice, tile: Tensor, labels: Tensor, first: int) -> None:
        """Add a tile, whose logits become exp(z - largest of these rows so far). `first`: number of its first word."""
        here = labels[rows] - first
        near = here.clamp(0, tile.shape[1] - 1)
        here_too = tile.gather(1, near.unsqueeze(1)).squeeze(1)
        self.target[rows].copy_(torch.where(near == here, here_too, self.target[rows]))
        before = self.largest[rows]
        now = torch.maximum(before, tile.amax(1))
        self.total[rows].mul_(torch.exp(before - now))
        before.copy_(now)
        self.total[rows].add_(tile.sub_(now.unsqueeze(1)).exp_().sum(1))


@dataclass(slots=True)
class _Gradients:
    """The gradients that are asked for, summed over tiles; those of the hidden states want a factor by row at the end.

    A tile given to it holds probabilities but for a factor by row, and for the slope of the map.
    """

    tiles: _Tiles
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(tiles: _Tiles, needs: tuple[bool, ...]) -> _Gradients:
        asked = zip(needs, (tiles.hidden, tiles.weight, tiles.bias), strict=False)
        made = [torch.zeros_like(x, dtype=tiles.sums) if need and x is not None else None for need, x in asked]
        return _Gradients(tiles, *made)

    def scaled(self, by_row: Tensor, rows: slice = slice(None)) -> Tensor | None:
        """Return the hidden states times a factor by row, which the head's gradient is made of."""
        if self.weight is None:
            return None
        factor = (by_row * self.tiles.slope).unsqueeze(1)
        return (self.tiles.hidden[rows] * factor).to(self.tiles.products)

    def add_hidden(self, rows: slice, tile: Tensor, columns: Tensor) -> None:
        if self.hidden is not None:
            _add_product(self.hidden[rows], tile.to(self.tiles.products), columns.to(self.tiles.products))

    def add_weight(self, words: slice, tile: Tensor, scaled: Tensor | None, by_row: Tensor, kept: Any = None) -> None:
        """Add a tile to the rows `words` of the head's gradient, or to those of them that the tile is of: `kept`."""
        if self.weight is not None:
            assert scaled is not None
            product = tile.to(self.tiles.products).t()
            if kept is None:
                _add_product(self.weight[words], product, scaled)
            else:
                self.weight[words].index_add_(0, kept, (product @ scaled).to(self.weight.dtype))
        if self.bias is not None:
            sums = torch.mv(tile.t(), by_row * self.tiles.slope)
            if kept is None:
                self.bias[words].add_(sums)
            else:
                self.bias[words].index_add_(0, kept, sums)

    def scale_hidden(self, rows: slice, factor: Tensor) -> None:
        if self.hidden is not None:
            self.hidden[rows].mul_(factor.unsqueeze(1))

    def add_labels(self, labels: Tensor, by_row: Tensor) -> None:
        """Add what the labels contribute, `by_row` each; labels of words that are elsewhere have none here."""
        weight, hidden = self.tiles.weight, self.tiles.hidden
        words = labels.clamp(0, weight.shape[0] - 1)
        factor = by_row * (words == labels)
        if self.hidden is not None:
            self.hidden.addcmul_(weight[words].to(self.tiles.sums), factor.unsqueeze(1))
        if self.weight is not None:
            self.weight.index_add_(0, words, hidden.to(self.tiles.sums) * factor.unsqueeze(1))
        if self.bias is not None:
            self.bias.index_add_(0, words, factor)

    def returned(self) -> tuple[Tensor | None, ...]:
        """Return the gradients in the dtypes of what they are of."""
        of = (self.tiles.hidden, self.tiles.weight, self.tiles.bias)
        made = zip((self.hidden, self.weight, self.bias), of, strict=True)
        return tuple(None if one is None or x is None else one.to(x.dtype) for one, x in made)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, whose dtype may be wider."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _kept(tile: Tensor, total: Tensor, smallest: float) -> Tensor | None:
    """Return the columns of a tile of which a row has a probability of at least `smallest`; None for all of them."""
    if not smallest:
        return None
    kept = ((tile / total.unsqueeze(1)).amax(0) >= smallest).nonzero().squeeze(1)
    return None if kept.numel() == tile.shape[1] else kept


class _Recomputed(torch.autograd.Function):
    """Losses and log-sum-exps; backward computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: HeadLoss
    ) -> tuple[Tensor, Tensor]:
        n, w = _block(labels.numel(), weight.shape[0], head)
        first = 0 if head.shard is None else head.shard.first
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _Tiles(hidden, weight, bias, head, n, w)
            rows, room = _Rows.of(labels, tiles.sums), tiles.room(n, w)
            for words in _spans(weight.shape[0], w):
                columns = tiles.words(words)
                for some in _spans(labels.numel(), n):
                    rows.take(some, tiles.logits(some, words, columns, room), labels, first + words.start)
        if head.shard is not None:
            own = rows.largest.clone()
            head.shard.maximum(rows.largest)
            rows.total.mul_(torch.exp(own - rows.largest))
            head.shard.total(rows.total)
            head.shard.total(rows.target)
        logs = rows.total.log()
        ctx.save_for_backward(hidden, weight, bias, labels, rows.largest, rows.total, rows.target)
        ctx.head = head
        return logs - (rows.target - rows.largest), rows.largest + logs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loss: Tensor, by_lse: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, largest, total, target = ctx.saved_tensors
        head, needs = ctx.head, ctx.needs_input_grad
        n, w = _block(labels.numel(), weight.shape[0], head)
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _Tiles(hidden, weight, bias, head, n, w)
            made = _Gradients.of(tiles, needs)
            room, factor = tiles.room(n, w), (by_loss + by_lse) / total
            scaled = made.scaled(factor)
            for words in _spans(weight.shape[0], w):
                columns = tiles.words(words)
                for some in _spans(labels.numel(), n):
                    tile = tiles.logits(some, words, columns, room).sub_(largest[some].unsqueeze(1)).exp_()
                    kept = _kept(tile, total[some], head.filter)
                    tile = tiles.through_map(tile)
                    near = columns
                    if kept is not None:
                        tile, near = tile[:, kept], columns[kept]
                    made.add_hidden(some, tile, near)
                    made.add_weight(words, tile, None if scaled is None else scaled[some], factor[some], kept)
            made.scale_hidden(slice(None), factor * tiles.slope)
            first = 0 if head.shard is None else head.shard.first
            made.add_labels(labels - first, -by_loss * tiles.slope_at(target))
            if head.shard is not None and made.hidden is not None:
                head.shard.total(made.hidden)
        return (*made.returned(), None, None)


class _InForward(torch.autograd.Function):
    """The sum of the losses times a factor; gradients are made in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        head: HeadLoss,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        keeps = needs[1] or needs[2]
        n, w = _block(labels.numel(), weight.shape[0], head, in_forward=True, makes_weight=keeps)
        spans = list(_spans(weight.shape[0], w))
        with torch.autocast(hidden.device.type, enabled=False):
            tiles = _Tiles(hidden, weight, bias, head, n, w)
            rows, made = _Rows.of(labels, tiles.sums), _Gradients.of(tiles, needs)
            rooms = [tiles.room(n, w) for _ in (spans if keeps else spans[:1])]
            for some in _spans(labels.numel(), n):
                kept: list[tuple[Tensor, Tensor]] = []
                for at, words in enumerate(spans):
                    columns, before = tiles.words(words), rows.largest[some].clone()
                    tile = tiles.logits(some, words, columns, rooms[at % len(rooms)])
                    rows.take(some, tile, labels, words.start)
                    made.scale_hidden(some, torch.exp(before - rows.largest[some]))
                    made.add_hidden(some, tiles.through_map(tile), columns)
                    if keeps:
                        kept.append((tile, rows.largest[some].clone()))
                factor = scale / rows.total[some]
                made.scale_hidden(some, factor * tiles.slope)
                for words, (tile, largest) in zip(spans, kept, strict=False):
                    by_row = factor * torch.exp(largest - rows.largest[some])
                    made.add_weight(words, tile, made.scaled(by_row, some), by_row)
            made.add_labels(labels, -scale * tiles.slope_at(rows.target))
        ctx.made = made.returned()
        return ((rows.total.log() - (rows.target - rows.largest)).sum() * scale).to(tiles.sums)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, ...]:
        made, ctx.made = ctx.made, None
        if made is None:
            raise RuntimeError(
                "the gradients of this loss were made in forward and have been used: compute the loss again, or set "
                "in_forward=False for several backward passes through one graph"
            )
        return (*(None if one is None else one.mul_(by_loss.to(one.dtype)) for one in made), None, None, None)
