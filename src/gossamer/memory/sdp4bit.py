"""Sdp4bit: as zero1, with gradients and updates of parameters in about four bits each.

Equations (rows r belong to rank r; w the replica that all ranks compute with, m the float32 rows of their owner):
    g[r] = sum_i w_i D(C(g_i[r]))  on rank r ;   m[r] <- update(m[r], g[r], state[r])
    w[r] <- w[r] + D(Q(m[r] - w[r]))  on all ranks, the owner too
Symbols: C `gradients` (rotated by H32, four bits, rounded at random: unbiased), Q `weights` (four bits).
The replica itself is the reference of the next difference: an error lasts one step, |m - w| <= one level of the last.
Wire:    (n-1)/n of the model's numbers, each about 0.53 bytes there and 0.502 back: an eighth of an all-reduce.
State:   that of zero1, and the float32 rows: 4/n bytes per parameter.
Paper:   Jia et al., SDP4Bit, NeurIPS 2024, arXiv 2410.15526 (groups of 2048 for weights, of 128 for gradients).
Unlike the paper: gradients cross all links alike; its first level of eight bits inside a machine is not here. The
random numbers of rounding are keyed by step and rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.compress import Exchange
from gossamer.compress.codec import Codec
from gossamer.compress.codec.hadamard import Hadamard
from gossamer.compress.codec.int4 import Int4
from gossamer.compress.dense import Dense
from gossamer.memory import Sharding
from gossamer.memory._scatter import Scatter
from gossamer.memory.zero1 import Zero1
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Sdp4bit(Sharding):
    """`gradients` codes them where plan.exchange is dense; another exchange goes on being what it is, as in zero1."""

    weights: Codec | None = field(default_factory=lambda: Int4(block_numel=2048, stochastic=True))
    gradients: Codec = field(default_factory=lambda: Hadamard(Int4(stochastic=True)))

    def __post_init__(self) -> None:
        for name, codec in (("weights", self.weights), ("gradients", self.gradients)):
            if codec is not None and not codec.traits.fixed_size:
                do = "give int4, int8 or a cast"
                raise bad_input(wanted="a codec whose messages have a fixed size", got=repr(codec), do=do, key=name)

    @property
    def is_sharded(self) -> bool:
        return True

    def exchange(self, given: Exchange) -> Exchange:
        return Scatter(self.gradients) if isinstance(given, Dense) else Zero1().exchange(given)
