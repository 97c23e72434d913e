"""Expert all-to-all: send rows to their ranks (tokens to experts) and back, unevenly, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.comm.random_key import Key, key_at
from gossamer.exchange.codec import Codec
from gossamer.p2p.activation import TensorSpec
from gossamer.p2p.activation._tensor_bytes import check_codec, check_floating, from_bytes, nbytes_of, to_bytes
from gossamer.spec.errors import WireMismatch

Carry: TypeAlias = Callable[[Rounds], Outcome]  # runs one job to its end, as `partial(carry, channel)` does


@dataclass(frozen=True, slots=True)
class RowSplits:
    """The numbers of rows that this rank sends to every rank of the group and receives from each, in rank order.

    `splits` and `arriving` are the input and output split sizes of all_to_all_single.
    """

    splits: tuple[int, ...]
    arriving: tuple[int, ...]

    @property
    def back(self) -> RowSplits:
        """The splits of the same rows sent back."""
        return RowSplits(self.arriving, self.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAllToAll:
    """An uneven all-to-all of rows over the group of `level`; without a codec rows of any dtype are sent exactly.

    Rows are encoded one by one, so a row decodes to the same values on every rank. All ranks call the same all-to-alls
    in the same order, forward and backward: where one rank needs gradients all ranks do, and a rank that got no row
    still uses the empty result (an expert of zero rows does).
    """

    rank: int
    levels: ProcessGroups
    codec: Codec | None = None
    back: Codec | None = None  # of gradients; None: the same codec
    level: str = "all"
    name: str = ""

    def __post_init__(self) -> None:
        check_codec(self.codec, "codec")
        check_codec(self.back, "back")

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that exchange rows, ascending."""
        return self.levels.group(self.level, self.rank)

    def agree(self, splits: Sequence[int], carry: Carry) -> RowSplits:
        """Exchange the row counts within the group: one small message.

        splits: rows from this rank to each rank of the group. Raises WireMismatch where there is not one count per
        rank.
        """
        if len(splits) != len(self.group):
            raise WireMismatch(
                f"expert all-to-all on rank {self.rank}: wanted one row count for each of the {len(self.group)} ranks "
                f"of the process group, got counts for {len(splits)} ranks: give a count for every rank of the group"
            )
        counts = carry(self._counts(splits)).mean
        return RowSplits(tuple(splits), tuple(counts[:, self.group.index(self.rank)].tolist()))

    def __call__(self, x: Tensor, split: RowSplits, *, at: tuple[int, ...], carry: Carry) -> Tensor:
        """Send the rows of `x` (rows, ...), in rank order of their targets; return the rows that arrive, in rank order.

        Differentiable: gradients go in the opposite direction, by the same `carry`. `at` (seed, step, ...) must differ
        from call to call and be equal on all ranks.
        """
        self.check(TensorSpec.of(x))
        if x.shape[0] != sum(split.splits):
            raise WireMismatch(
                f"expert all-to-all on rank {self.rank}: wanted a tensor of {sum(split.splits)} rows, the sum of its "
                f"row counts, got {x.shape[0]} rows: give the row counts of this tensor"
            )
        arrived: Tensor = _Shuffled.apply(x, self, split, at, carry)  # type: ignore[no-untyped-call]
        return arrived

    def job(self, x: Tensor, split: RowSplits, key: Key, *, back: bool = False) -> Rounds:
        """Run one direction without autograd; the Outcome's mean is the rows that arrive."""
        codec, width = self._codec(back), prod(x.shape[1:])
        sent = to_bytes(codec, x.detach().reshape(x.shape[0], width), key)  # (rows, nbytes)
        (arrived,) = yield Message((sent,), Collective.SHUFFLE, self.level, split.splits, split.arriving)
        rows = from_bytes(codec, arrived, width, x.dtype, key)
        return Outcome(rows.view(arrived.shape[0], *x.shape[1:]), None, ExchangeState())

    def traffic(self, row: TensorSpec, split: RowSplits, *, back: bool = False) -> Traffic:
        """Return the traffic of one all-to-all from this rank; `row` is the shape of one row.

        Pass `split.back` and `back=True` for the gradients or the rows sent back.
        """
        each = nbytes_of(self._codec(back), row.numel, row.dtype)
        splits, arriving = (tuple(n * each for n in counts) for counts in (split.splits, split.arriving))
        return Traffic(Collective.SHUFFLE, sum(splits), 1, self.level, splits, arriving)

    def check(self, form: TensorSpec) -> None:
        """Raise BadInput where the codecs cannot encode such rows."""
        if self.codec is not None or self.back is not None:
            check_floating(form.dtype, coded=True)

    def key(self, at: tuple[int, ...], *, back: bool) -> Key:
        """Return the random key of one direction of one all-to-all."""
        return key_at((*at, "rows", self.name, "back" if back else "there"), self.rank)

    def _codec(self, back: bool) -> Codec | None:
        return (self.back or self.codec) if back else self.codec

    def _counts(self, splits: Sequence[int]) -> Rounds:
        (counts,) = yield Message((torch.tensor(list(splits), dtype=torch.int32),), Collective.GATHER, self.level)
        return Outcome(counts, None, ExchangeState())  # (from, to)


class _Shuffled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: RowAllToAll, split: RowSplits, at: tuple[int, ...], carry: Carry) -> Tensor:
        ctx.wire, ctx.split, ctx.at, ctx.carry = wire, split, at, carry
        return carry(wire.job(x, split, wire.key(at, back=False))).mean

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        wire: RowAllToAll = ctx.wire
        job = wire.job(gradient, ctx.split.back, wire.key(ctx.at, back=True), back=True)
        return ctx.carry(job).mean, None, None, None, None
