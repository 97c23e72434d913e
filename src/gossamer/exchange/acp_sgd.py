"""AcpSgd: the two factors of Power-SGD in turn, one per step, so that a step sends one message and waits once.

Equations (per matrix of the bucket; even turns, and on odd turns the same of M^T with P and Q exchanged):
    P_i  = M_i Q,   P_all = sum_i w_i P_i
    mean = P_all Q^T;   lost_i = M_i - P_i Q^T
    P   <- orth(P_all), a column of zeros being the one before
Symbols: M_i (n1, n2) a tensor of rank i, first dimension against the rest; w_i its weight; P (n1, r), Q (n2, r) the
orthonormal factors; r = min(rank, n1, n2). Turns are counted in the state, which all ranks hold alike: a rejected step
is no turn, and an exchange every second step still takes turns. Vectors and tensors for which r (n1 + n2) >= 2 n1 n2
go along in the same message as they are.
Wire:    1 round SUM over the whole bucket, r n1 float32 per matrix on even turns, r n2 on odd ones; `traffic` is the
         larger. (Sent as large as that always, GPT-2 in buckets of 25 MB would send 29 % more, most of it for the
         embedding; SmolLM2-135M 18 %. So messages are as long as they need to be.)
State:   r (n1 + n2) float32 per matrix, "p@name" and "q@name", and "turn@name"; the same on all ranks.
Work:    6 r n1 n2 flop and 2 r^2 n1 or 2 r^2 n2 for orth.
Paper:   Zhang et al., arXiv 2306.08881.   Contraction: none, M may be orthogonal to Q.
Good when: as for Power-SGD where round trips are what costs; at equal bytes take twice its rank.   Not for: learning
rates near what is stable (its residual is larger and later than Power-SGD's), the first steps (see warmup), vectors,
machines of several kinds (every rank computes the factor from the same bytes).   Wants feedback.
Unlike the paper: orth by Householder reflections after the exchange, so that the state holds the factors as used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from gossamer.ops.orthogonalize import orthonormal, unit_rows


@dataclass(frozen=True, slots=True)
class AcpSgd(Exchange):
    """An exchange that sends `rank` columns of one of each matrix's two factors, in turn."""

    rank: int = 4

    def __post_init__(self) -> None:
        check_rank(self.rank)

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(fixed_size=False)

    def init(self, layout: Layout) -> ExchangeState:
        tensors: dict[str, Tensor] = {}
        for batch in self._split(layout).batches:
            tensors |= {f"turn@{name}": torch.zeros((), dtype=torch.int64) for name in batch.names}
            for side in ("p", "q"):
                tensors |= batch.named(orthonormal(batch.random(side, layout.device)), side)
        return ExchangeState(tensors)

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        cut, flat = self._split(x.layout), x.flat.float()
        mean = torch.empty_like(flat)
        turn = _turn(state.tensors)
        right_is_sent = turn % 2 == 1
        known, new = ("p", "q") if right_is_sent else ("q", "p")
        fixed = [b.gather(state.tensors, known) for b in cut.batches]
        matrices = [b.matrices(flat) for b in cut.batches]
        mine = [torch.bmm(f, m if right_is_sent else m.mT) for f, m in zip(fixed, matrices, strict=True)]
        (reply,) = yield Message((cut.pack(flat, mine).mul_(at.share),), Collective.SUM)
        agreed = cut.unpack(reply, [b.right_shape if right_is_sent else b.left_shape for b in cut.batches], mean)
        cut.lose_dense(flat)  # from here on, `flat` turns into what is lost
        tensors, after = dict(state.tensors), torch.tensor(turn + 1)
        for batch, shared, own, both in zip(cut.batches, fixed, mine, agreed, strict=True):
            batch.put(mean, *((shared, both) if right_is_sent else (both, shared)))
            batch.take(flat, *((shared, own) if right_is_sent else (own, shared)))
            factor = orthonormal(unit_rows(both, batch.gather(state.tensors, new)))
            tensors |= batch.named(factor, new)
            tensors |= {f"turn@{name}": after for name in batch.names}
        return Outcome(mean.to(x.layout.dtype), flat, ExchangeState(tensors))

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        cut = self._split(layout)
        factors = max(sum(b.left_numel for b in cut.batches), sum(b.right_numel for b in cut.batches))
        return (Traffic(Collective.SUM, cut.dense_numel + factors, 4),)

    def contraction(self, layout: Layout) -> float | None:
        return None if self._split(layout).batches else 1.0

    def _split(self, layout: Layout) -> MatrixSplit:
        return split(layout, self.rank, steps=2)


def _turn(tensors: Mapping[str, Tensor]) -> int:
    """Which turn it is: that of the matrix that has had most."""
    return max((int(t) for name, t in tensors.items() if name.startswith("turn@")), default=0)
