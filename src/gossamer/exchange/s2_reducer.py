"""S2Reducer: a count-sketch of the non-zeros and a bitmap of where they are; both can be summed, so all-reduce serves.

Equations (U the union of the ranks' non-zeros, u = |U|; h_j, s_j hash and sign of row j from the shared key):
    b     = OR_i b_i,   b_i the bits of x_i != 0
    S_i[j, h_j(k)] += s_j(k) x_i[k]   for k in U;   S = sum_i w_i S_i
    mean[k]   = s_j(k) S[j, h_j(k)]   for k in U, 0 elsewhere;   j = j(k) the row with the median of the rows
    kept_i[k] = s_j(k) S_i[j, h_j(k)] with the same j(k), so that mean = sum_i w_i kept_i although a median is taken
Symbols: x_i (numel,) input of rank i; w_i its weight; r `rows`; c = ceil(cells u / r) columns.
Wire:    OR of numel / 8 bytes; SUM of r c float32. Where r c >= numel, the whole bucket instead, and nothing is lost.
State:   none.   Work: one pass over numel, about 10 r u random reads and writes.
Paper:   Ge et al., S2 Reducer, arXiv 2110.02140.
Contraction over hashes: delta = 1 - r / cells, that of one row; a median of rows is no worse, their errors being
symmetric, and much better on heavy tails. Unbiased with one row. Exact where nothing in U collides.
-0.0 and denormals count as non-zero.
Good when: supports of many ranks overlap and noise does no harm (3 rows where magnitudes differ widely).
Not for: what must be exact: block_sparse sends, after a smaller bitmap, one number per entry where this sends `cells`.
Few ranks: gathering values and places is smaller while supports overlap little (tests/claims). Feedback around it: what
a collision leaves behind stays in the residual, so supports grow with every step.
Unlike the paper: the sketch is sized by this step's union, which is known from the bitmap before it is sent, and not
by the last one's: nothing to remember, and no sketch is too small after a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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
from gossamer.comm.random_key import key_of
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.ops.sketch import Hashes, median
from gossamer.ops.topk_indices import count_bits, places_of_bits, to_bits
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class S2Reducer(Exchange):
    """An exchange of count-sketches: `cells` cells in `rows` rows for every entry that is not zero on some rank."""

    cells: float = 2.0
    rows: int = 1

    def __post_init__(self) -> None:
        if not self.cells > 0:
            raise bad_input(wanted="cells > 0", got=repr(self.cells), do="give 2", key="cells")
        if self.rows < 1 or self.rows % 2 == 0:
            raise bad_input(wanted="an odd number of rows", got=repr(self.rows), do="give 1, or 3", key="rows")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(fixed_size=False)

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat = x.flat.float()
        mine = to_bits(flat.view(torch.int32) != 0)
        (union,) = yield Message((mine.cpu(),), Collective.OR)
        columns = ceil(self.cells * count_bits(union) / self.rows)
        if self.rows * columns >= flat.numel():
            (mean,) = yield Message((flat * at.share,), Collective.SUM)
            return Outcome(mean.to(x.layout.dtype), torch.zeros_like(flat), state)
        places = places_of_bits(union).to(flat.device)
        hashes = Hashes.draw(places, self.rows, columns, key_of(at, x.layout).agreed(flat.device))
        sketch = hashes.encode(flat[places])
        (total,) = yield Message((sketch * at.share,), Collective.SUM)
        answers = hashes.decode(total)  # (rows, union)
        row = median(answers)
        mean, kept = (_spread(a.gather(0, row)[0], places, flat) for a in (answers, hashes.decode(sketch)))
        return Outcome(mean.to(x.layout.dtype), flat - kept, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return Traffic(Collective.OR, -(-layout.numel // 8), 1), Traffic(Collective.SUM, layout.numel, 4)

    def contraction(self, layout: Layout) -> float | None:
        left = 1 - self.rows / self.cells
        return left if left > 0 else None


def _spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_copy_(0, places, values)
