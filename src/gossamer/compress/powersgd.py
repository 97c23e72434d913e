"""PowerSgd: two thin factors instead of a matrix, by one power iteration per step from where the last one ended.

Equations (per matrix of the bucket):
    P     = orth(sum_i w_i M_i Q)
    mean  = P (sum_i w_i M_i^T P)^T = P P^T sum_i w_i M_i;   lost_i = M_i - P P^T M_i
    Q     <- sum_i w_i M_i^T P, every column divided by its largest magnitude (a column of zeros: the one before)
Symbols: M_i (n1, n2) a tensor of rank i, first dimension against the rest; w_i its weight; P (n1, r); Q (n2, r).
Tensors for which r (n1 + n2) >= n1 n2, r = min(rank, n1, n2), and vectors go along in the first message as they are.
Wire:    2 rounds SUM over the whole bucket, r n1 and r n2 float32 per matrix; 1 round without any matrix.
State:   r n2 float32 per matrix, "q@name", the same on all ranks.   Work: 8 r n1 n2 flop and 2 r^2 n1 for orth.
Paper:   Vogels, Karimireddy, Jaggi, arXiv 1905.13727.   Contraction: none, M may be orthogonal to Q.
Good when: links of 1 Gbit/s and less, matrices much larger than r.   Not for: vectors, embeddings at low rank, the
first steps (see warm_up), machines of several kinds (every rank computes P from the same bytes).   Wants feedback.
Unlike the paper: orth by Householder reflections, not Gram-Schmidt; what rank i loses is missing in its own part of
the mean, not in the mean, so that w_i counts: both leave the same sum for feedback, hence the same means from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.compress import Exchange, Traits
from gossamer.compress._low_rank import Split, check_rank, split
from gossamer.ops.orthonormal import orthonormal, unit_rows
from gossamer.wire.bucket import Bucket, Layout
from gossamer.wire.message import Combine, Levels, Message, Outcome, Round, Rounds, State, Traffic


@dataclass(frozen=True, slots=True)
class PowerSgd(Exchange):
    """`rank` columns of a matrix' two factors are sent."""

    rank: int = 4

    def __post_init__(self) -> None:
        check_rank(self.rank)

    @property
    def traits(self) -> Traits:
        return Traits()

    def init(self, layout: Layout) -> State:
        batches = self._split(layout).batches
        drawn = [b.named(b.random("q", layout.device), "q") for b in batches]
        return State({name: q for named in drawn for name, q in named.items()})

    def run(self, x: Bucket, state: State, at: Round) -> Rounds:
        cut, flat = self._split(x.layout), x.flat.float()
        mean = torch.empty_like(flat)
        matrices = [b.matrices(flat) for b in cut.batches]
        before = [b.gather(state.tensors, "q") for b in cut.batches]
        sent = [torch.bmm(q, m.mT) for q, m in zip(before, matrices, strict=True)]  # (batch, r, n1)
        (reply,) = yield Message((cut.pack(flat, sent, at.share),), Combine.SUM)
        lefts = [orthonormal(p) for p in cut.unpack(reply, [b.left for b in cut.batches], mean)]
        cut.clear_dense(flat)  # from here on, `flat` turns into what is lost
        if not cut.batches:
            return Outcome(mean.to(x.layout.dtype), flat, state)
        mine = [torch.bmm(p, m) for p, m in zip(lefts, matrices, strict=True)]  # (batch, r, n2)
        second = Split((), cut.batches)
        (reply,) = yield Message((second.pack(flat, mine, at.share),), Combine.SUM)
        agreed = second.unpack(reply, [b.right for b in cut.batches], mean)
        tensors: dict[str, Tensor] = {}
        for batch, left, own, right, old in zip(cut.batches, lefts, mine, agreed, before, strict=True):
            batch.put(mean, left, right)
            if at.accounts:
                batch.take(flat, left, own)
            tensors |= batch.named(unit_rows(right, old), "q")
        return Outcome(mean.to(x.layout.dtype), flat if at.accounts else None, State(tensors))

    def traffic(self, layout: Layout, levels: Levels, rank: int) -> tuple[Traffic, ...]:
        cut = self._split(layout)
        first = Traffic(Combine.SUM, cut.dense_numel + sum(b.left_numel for b in cut.batches), 4)
        return (first, Traffic(Combine.SUM, sum(b.right_numel for b in cut.batches), 4)) if cut.batches else (first,)

    def contraction(self, layout: Layout) -> float | None:
        return None if self._split(layout).batches else 1.0

    def _split(self, layout: Layout) -> Split:
        return split(layout, self.rank, steps=1)
