"""AcpSgd: the two factors of Power-SGD in turn, one per step, so that a step sends one message and waits once.

Equations (per matrix of the bucket; even turns, and on odd turns the same of M^T with P and Q exchanged):
    P_i  = M_i Q,   P_all = sum_i w_i P_i
    mean = P_all Q^T;   lost_i = M_i - P_i Q^T
    P   <- orth(P_all), a column of zeros being the one before
The sum is `factor_exchange`: dense, or a coded one, which sends a fourth of the bytes in eight bits. What it loses of
P_i is missing in the mean, so lost_i = M_i - (P_i - its lost_i) Q^T, and what it owes times Q^T is owed.
Symbols: M_i (n1, n2) a tensor of rank i, first dimension against the rest; w_i its weight; P (n1, r), Q (n2, r) the
orthonormal factors; r = min(rank, n1, n2). Turns are counted in the state, which all ranks hold alike: a rejected step
is no turn, and an exchange every second step still takes turns. Vectors and tensors for which r (n1 + n2) >= 2 n1 n2
go along in the same message as they are.
Wire:    what `factor_exchange` sends of the whole bucket: r n1 numbers per matrix on even turns, r n2 on odd ones (1
         round SUM of float32 where it is dense); `traffic` is the larger. (Sent as large as that always, GPT-2 in
         buckets of 25 MB would send 29 % more, most of it for the embedding; SmolLM2-135M 18 %. So messages are as long
         as they need to be.)
State:   r (n1 + n2) float32 per matrix, "p@name" and "q@name", and "turn@name"; the same on all ranks.
Work:    6 r n1 n2 flop and 2 r^2 n1 or 2 r^2 n2 for orth.
Paper:   Zhang et al., arXiv 2306.08881.   Contraction: none, M may be orthogonal to Q.
Good when: as for Power-SGD where round trips are what costs; at equal bytes take twice its rank.   Not for: learning
rates near what is stable (its residual is larger and later than Power-SGD's), the first steps (see warmup), vectors,
machines of several kinds (every rank computes the factor from the same bytes).   Wants feedback.
Unlike the paper: `factor_exchange`; orth by Householder reflections after the exchange, so that the state holds the
factors as used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.message import ExchangeContext, ExchangeState, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.exchange._low_rank import MatrixSplit, check_rank, check_without_feedback, split
from gossamer.exchange.dense import Dense
from gossamer.ops.orthogonalize import orthonormal, unit_rows

_SIDES = ("p", "q")


@dataclass(frozen=True, slots=True)
class AcpSgd(Exchange):
    """An exchange that sends `rank` columns of one of each matrix's two factors, in turn, by `factor_exchange`."""

    rank: int = 4
    factor_exchange: Exchange = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_rank(self.rank)
        check_without_feedback(self.factor_exchange, "factor_exchange", "the low-rank factors", around="acp_sgd")

    @property
    def parts(self) -> tuple[Exchange, ...]:
        return self.factor_exchange, self.factor_exchange  # a state for each side

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(fixed_size=False)

    @property
    def needs_same_ranks(self) -> bool:
        return True

    def init(self, layout: Layout) -> ExchangeState:
        cut = self._split(layout)
        tensors: dict[str, Tensor] = {}
        for batch in cut.batches:
            tensors |= {f"turn@{name}": torch.zeros((), dtype=torch.int64) for name in batch.names}
            for side in _SIDES:
                tensors |= batch.named(orthonormal(batch.random(side, layout.device)), side)
        return ExchangeState(tensors, tuple(self.factor_exchange.init(cut.packed(layout, side)) for side in _SIDES))

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        cut, flat = self._split(x.layout), x.flat.float()
        mean = torch.empty_like(flat)
        turn = _turn(state.tensors)
        right_is_sent = turn % 2 == 1
        new, known = _SIDES[right_is_sent], _SIDES[not right_is_sent]
        fixed = [b.gather(state.tensors, known) for b in cut.batches]
        matrices = [b.matrices(flat) for b in cut.batches]
        own = cut.pack(flat, [torch.bmm(f, m if right_is_sent else m.mT) for f, m in zip(fixed, matrices, strict=True)])
        sent, inner = Bucket(cut.packed(x.layout, new), own.clone()), list(state.inner)
        out = yield from self.factor_exchange.run(sent, inner[right_is_sent], at)
        inner[right_is_sent] = out.state
        shapes = [b.shape(new) for b in cut.batches]
        agreed, mine = cut.unpack(out.mean, shapes, mean), cut.factors_of(out.less_lost(own), shapes)
        cut.lose_dense(flat, out.lost)  # from here on, `flat` turns into what is lost
        tensors, after = dict(state.tensors), torch.tensor(turn + 1)
        for batch, shared, kept, both in zip(cut.batches, fixed, mine, agreed, strict=True):
            batch.put(mean, *((shared, both) if right_is_sent else (both, shared)))
            if at.accounts:
                batch.take(flat, *((shared, kept) if right_is_sent else (kept, shared)))
            factor = orthonormal(unit_rows(both, batch.gather(state.tensors, new)))
            tensors |= batch.named(factor, new)
            tensors |= {f"turn@{name}": after for name in batch.names}
        owed = None
        if out.owed is not None:
            owed = cut.dense_of(out.owed, flat)
            for batch, shared, rest in zip(cut.batches, fixed, cut.factors_of(out.owed, shapes), strict=True):
                batch.put(owed, *((shared, rest) if right_is_sent else (rest, shared)))
        lost = flat if at.accounts else None
        return Outcome(mean.to(x.layout.dtype), lost, ExchangeState(tensors, tuple(inner)), owed)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        cut = self._split(layout)
        larger = max(_SIDES, key=lambda side: cut.packed(layout, side).numel)
        return self.factor_exchange.traffic(cut.packed(layout, larger), levels, rank)

    def contraction(self, layout: Layout) -> float | None:
        cut = self._split(layout)
        return None if cut.batches else self.factor_exchange.contraction(cut.packed(layout, "p"))

    def check(self, layout: Layout, levels: ProcessGroups) -> None:
        for side in _SIDES:
            self.factor_exchange.check(self._split(layout).packed(layout, side), levels)

    def _split(self, layout: Layout) -> MatrixSplit:
        return split(layout, self.rank, steps=2)


def _turn(tensors: Mapping[str, Tensor]) -> int:
    """Which turn it is: that of the matrix that has had most."""
    return max((int(t) for name, t in tensors.items() if name.startswith("turn@")), default=0)
