"""PowerSgd: two thin factors instead of a matrix, by one power iteration per step from where the last one ended.

Equations (per matrix of the bucket):
    P     = orth(sum_i w_i M_i Q)
    mean  = P (sum_i w_i M_i^T P)^T = P P^T sum_i w_i M_i;   lost_i = M_i - P P^T M_i
    Q     <- sum_i w_i M_i^T P, every column divided by its largest magnitude (a column of zeros: the one before)
Symbols: M_i (n1, n2) a tensor of rank i, first dimension against the rest; w_i its weight; P (n1, r); Q (n2, r).
The sum before orth is `p_exchange`, an exchange of its own: dense, or a coded one. What it rounds off turns the space
that is projected on and loses nothing besides, as Q is computed for the P that all ranks hold in the end: for eight
bits and an embedding, whose n1 is the vocabulary, that is nearly all of the bytes by four. Tensors for which r (n1 +
n2) >= n1 n2, r = min(rank, n1, n2), and vectors go along with P as they are.
Wire:    what `p_exchange` sends of r n1 numbers per matrix, then SUM of r n2 float32, which is left out without any
matrix.
State:   r n2 float32 per matrix, "q@name", the same on all ranks.   Work: 8 r n1 n2 flop and 2 r^2 n1 for orth.
Paper:   Vogels, Karimireddy, Jaggi, arXiv 1905.13727.   Contraction: none, M may be orthogonal to Q.
Good when: links of 1 Gbit/s and less, matrices much larger than r.   Not for: vectors, embeddings at low rank, the
first steps (see warmup), machines of several kinds (every rank computes P from the same bytes).   Wants feedback.
Unlike the paper: `p_exchange`; orth by Householder reflections, not Gram-Schmidt; what rank i loses is missing in its
own part of the mean, not in the mean, so that w_i counts: both leave the same sum for feedback, hence the same means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    Traffic,
)
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._low_rank import MatrixSplit, check_rank, split
from gossamer.exchange.dense import Dense
from gossamer.ops.orthogonalize import orthonormal, unit_rows
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class PowerSgd(Exchange):
    """An exchange that sends `rank` columns of each matrix's two factors, the left ones by `p_exchange`."""

    rank: int = 4
    p_exchange: Exchange = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_rank(self.rank)
        if self.p_exchange.traits.remembers:
            wanted = "an exchange without error feedback for the low-rank factor P"
            do = "choose another p_exchange, and write {error_feedback: {powersgd: ...}} for error feedback"
            raise bad_input(wanted=wanted, got=repr(self.p_exchange), do=do, key="p_exchange")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(fixed_size=self.p_exchange.traits.fixed_size)

    def init(self, layout: Layout) -> ExchangeState:
        cut = self._split(layout)
        drawn = [b.named(b.random("q", layout.device), "q") for b in cut.batches]
        return ExchangeState(
            {name: q for named in drawn for name, q in named.items()}, (self.p_exchange.init(cut.first(layout)),)
        )

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        cut, flat = self._split(x.layout), x.flat.float()
        mean = torch.empty_like(flat)
        matrices = [b.matrices(flat) for b in cut.batches]
        before = [b.gather(state.tensors, "q") for b in cut.batches]
        sent = [torch.bmm(q, m.mT) for q, m in zip(before, matrices, strict=True)]  # (batch, r, n1)
        first = Bucket(cut.first(x.layout), cut.pack(flat, sent))
        (inner,) = state.inner
        out = yield from self.p_exchange.run(first, inner, at)
        lefts = [orthonormal(p) for p in cut.unpack(out.mean, [b.left_shape for b in cut.batches], mean)]
        cut.lose_dense(flat, out.lost)  # from here on, `flat` turns into what is lost
        mine = [torch.bmm(p, m) for p, m in zip(lefts, matrices, strict=True)]  # (batch, r, n2)
        agreed: list[Tensor] = []
        if cut.batches:
            second = MatrixSplit((), cut.batches)
            (reply,) = yield Message((second.pack(flat, mine).mul_(at.share),), Collective.SUM)
            agreed = second.unpack(reply, [b.right_shape for b in cut.batches], mean)
        tensors: dict[str, Tensor] = {}
        for batch, left, own, right, old in zip(cut.batches, lefts, mine, agreed, before, strict=True):
            batch.put(mean, left, right)
            if at.accounts:
                batch.take(flat, left, own)
            tensors |= batch.named(unit_rows(right, old), "q")
        lost, owed = (flat if at.accounts else None), (None if out.owed is None else cut.dense_of(out.owed, flat))
        return Outcome(mean.to(x.layout.dtype), lost, ExchangeState(tensors, (out.state,)), owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        cut = self._split(layout)
        first = self.p_exchange.traffic(cut.first(layout), levels, rank)
        right = sum(b.right_numel for b in cut.batches)
        return (*first, Traffic(Collective.SUM, right, 4)) if cut.batches else first

    def contraction(self, layout: Layout) -> float | None:
        cut = self._split(layout)
        return None if cut.batches else self.p_exchange.contraction(cut.first(layout))

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        self.p_exchange.check(self._split(layout).first(layout), levels)

    def _split(self, layout: Layout) -> MatrixSplit:
        return split(layout, self.rank, steps=1)
