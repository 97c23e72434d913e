"""PowerSgd: two thin factors instead of a matrix, by one power iteration per step from where the last one ended.

Equations (per matrix of the bucket):
    P     = orth(sum_i w_i M_i Q)
    mean  = P (sum_i w_i Q_i)^T,   Q_i = M_i^T P;   lost_i = M_i - P Q_i^T
    Q     <- sum_i w_i Q_i, every column divided by its largest magnitude (a column of zeros: the one before)
Symbols: M_i (n1, n2) a tensor of rank i, first dimension against the rest; w_i its weight; P (n1, r); Q (n2, r).
The sum before orth is `p_exchange`, the one after it `q_exchange`: dense, or a coded one. What the first one rounds off
turns the space that is projected on and loses nothing besides, as Q_i is computed for the P that all ranks hold in the
end. What the second one loses of Q_i is missing in the mean, so lost_i = M_i - P (Q_i - its lost_i)^T, and P times what
it owes is owed. In eight bits both send a fourth of the bytes. Tensors for which r (n1 + n2) >= n1 n2, r = min(rank,
n1, n2), and vectors go along with P as they are.
Wire:    what `p_exchange` sends of r n1 numbers per matrix, then what `q_exchange` sends of r n2, which is left out
without any matrix.
State:   r n2 float32 per matrix, "q@name", the same on all ranks.   Work: 8 r n1 n2 flop and 2 r^2 n1 for orth.
Paper:   Vogels, Karimireddy, Jaggi, arXiv 1905.13727.   Contraction: none, M may be orthogonal to Q.
Good when: links of 1 Gbit/s and less, matrices much larger than r.   Not for: vectors, embeddings at low rank, the
first steps (see warmup), machines of several kinds (every rank computes P from the same bytes).   Wants feedback.
Unlike the paper: `p_exchange` and `q_exchange`; orth by Householder reflections, not Gram-Schmidt; what rank i loses is
missing in its own part of the mean, not in the mean, so that w_i counts: both leave the same sum for feedback, hence
the same means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._low_rank import MatrixSplit, check_rank, check_without_feedback, split
from gossamer.exchange.dense import Dense
from gossamer.ops.orthogonalize import orthonormal, unit_rows


@dataclass(frozen=True, slots=True)
class PowerSgd(Exchange):
    """An exchange that sends `rank` columns of each matrix's two factors, by `p_exchange` and then by `q_exchange`."""

    rank: int = 4
    p_exchange: Exchange = field(default_factory=Dense)
    q_exchange: Exchange = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_rank(self.rank)
        check_without_feedback(self.p_exchange, "p_exchange", "the low-rank factor P", around="powersgd")
        check_without_feedback(self.q_exchange, "q_exchange", "the low-rank factor Q", around="powersgd")

    @property
    def traits(self) -> ExchangeTraits:
        both = (self.p_exchange.traits, self.q_exchange.traits)
        return ExchangeTraits(fixed_size=all(one.fixed_size for one in both))

    def init(self, layout: Layout) -> ExchangeState:
        cut = self._split(layout)
        drawn = [b.named(b.random("q", layout.device), "q") for b in cut.batches]
        inner = (self.p_exchange.init(cut.packed(layout, "p")), self.q_exchange.init(cut.factors.packed(layout, "q")))
        return ExchangeState({name: q for named in drawn for name, q in named.items()}, inner)

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        cut, flat = self._split(x.layout), x.flat.float()
        mean = torch.empty_like(flat)
        matrices = [b.matrices(flat) for b in cut.batches]
        before = [b.gather(state.tensors, "q") for b in cut.batches]
        sent = [torch.bmm(q, m.mT) for q, m in zip(before, matrices, strict=True)]  # (batch, r, n1)
        first = Bucket(cut.packed(x.layout, "p"), cut.pack(flat, sent))
        p_state, q_state = state.inner
        out = yield from self.p_exchange.run(first, p_state, at)
        lefts = [orthonormal(p) for p in cut.unpack(out.mean, [b.left_shape for b in cut.batches], mean)]
        cut.lose_dense(flat, out.lost)  # from here on, `flat` turns into what is lost
        owed = None if out.owed is None else cut.dense_of(out.owed, flat)
        tensors: dict[str, Tensor] = {}
        if cut.batches:
            second, shapes = cut.factors, [b.right_shape for b in cut.batches]
            own = second.pack(flat, [torch.bmm(p, m) for p, m in zip(lefts, matrices, strict=True)])  # (batch, r, n2)
            met = yield from self.q_exchange.run(Bucket(second.packed(x.layout, "q"), own.clone()), q_state, at)
            q_state = met.state
            agreed = second.unpack(met.mean, shapes, mean)
            kept = second.factors_of(met.less_lost(own), shapes)
            for batch, left, mine, right, old in zip(cut.batches, lefts, kept, agreed, before, strict=True):
                batch.put(mean, left, right)
                if at.accounts:
                    batch.take(flat, left, mine)
                tensors |= batch.named(unit_rows(right, old), "q")
            if met.owed is not None:
                owed = torch.zeros_like(flat) if owed is None else owed
                for batch, left, right in zip(cut.batches, lefts, second.factors_of(met.owed, shapes), strict=True):
                    batch.put(owed, left, right)
        lost = flat if at.accounts else None
        return Outcome(mean.to(x.layout.dtype), lost, ExchangeState(tensors, (out.state, q_state)), owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        cut = self._split(layout)
        first = self.p_exchange.traffic(cut.packed(layout, "p"), levels, rank)
        if not cut.batches:
            return first
        return (*first, *self.q_exchange.traffic(cut.factors.packed(layout, "q"), levels, rank))

    def contraction(self, layout: Layout) -> float | None:
        cut = self._split(layout)
        return None if cut.batches else self.p_exchange.contraction(cut.packed(layout, "p"))

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        cut = self._split(layout)
        self.p_exchange.check(cut.packed(layout, "p"), levels)
        if cut.batches:
            self.q_exchange.check(cut.factors.packed(layout, "q"), levels)

    def _split(self, layout: Layout) -> MatrixSplit:
        return split(layout, self.rank, steps=1)
