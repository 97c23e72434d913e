"""RandomBlocks: contiguous blocks that all ranks draw alike; values alone are sent and can be summed (GRBS of CSER).

Equations:
    kept_i = x_i on m of the B blocks, 0 elsewhere;   mean = sum_i w_i kept_i
Symbols: x_i (numel,) input of rank i; w_i its weight; B = ceil(numel / b) blocks of b = `block_size` numbers (the
last one may be shorter; small buckets have smaller blocks); m = max(1, round(fraction B)), drawn from the shared key.
Wire:    SUM of m b float32.   State: none.   Work: copies of m b numbers.
Paper:   Xie et al., CSER, arXiv 2007.13221 (globally-randomized blockwise sparsifier).   Contraction: delta = m / B.
Good when: the link is very slow and compute scarce: nothing is cheaper.   Not for: use without feedback or reset.
Unlike the paper: blocks are drawn within a bucket, not among all parameters, so that every bucket has its share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
from gossamer.exchange._sparse import FractionExchange, placed, taken
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class RandomBlocks(FractionExchange):
    """An exchange that sends `fraction` (1 / R in the paper) of a bucket's blocks, drawn from a shared key."""

    fraction: float = 1 / 32
    block_size: int = 1024

    def __post_init__(self) -> None:
        FractionExchange.__post_init__(self)
        if self.block_size < 1:
            raise bad_input(wanted="1 or more", got=repr(self.block_size), do="give 1024", key="block_size")

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        flat, block = x.flat.float(), self._block(x.layout)
        rng = key_of(at, x.layout).agreed(flat.device)
        blocks = torch.randperm(self._blocks(x.layout), generator=rng, device=flat.device)
        chosen = blocks[: self._count(x.layout)].sort().values
        sent = taken(flat, chosen, block)
        (total,) = yield Message((sent * at.share,), Collective.SUM)
        mean, kept = (placed(rows, chosen, flat.numel()) for rows in (total, sent))
        return Outcome(mean.to(x.layout.dtype), flat - kept, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.SUM, self._count(layout) * self._block(layout), 4),)

    def contraction(self, layout: Layout) -> float | None:
        return self._count(layout) / max(1, self._blocks(layout))

    def _block(self, layout: Layout) -> int:
        """Return the block length: at most the elements to send, so that a small bucket is not sent completely."""
        return max(1, min(self.block_size, round(self.fraction * layout.numel)))

    def _blocks(self, layout: Layout) -> int:
        return -(-layout.numel // self._block(layout))

    def _count(self, layout: Layout) -> int:
        blocks = self._blocks(layout)
        return min(blocks, max(1, round(self.fraction * blocks)))
