"""Sdp4bit: optimizer states are sharded as in zero1; gradients and parameter updates take about four bits per number.

Equations (rows r belong to rank r; w the replica that all ranks compute with, m the float32 rows of their owner):
    g[r] = sum_i w_i D(C(g_i[r]))  on rank r ;   m[r] <- update(m[r], g[r], state[r])
    w[r] <- w[r] + D(Q(m[r] - w[r]))  on all ranks, the owner too
and on islands I, in place of the first, with W_I the sum of w_i over I:
    g[r] = sum_I W_I D(C(sum_{i in I} (w_i / W_I) D(C'(g_i[r]))))
Symbols: C `gradients` (rotated by H32, four bits, rounded at random: unbiased), C' `intra_gradients` (the same in
eight bits), Q `weights` (four bits); null for numbers as they are. An owner's own numbers need no code.
The replica itself is the reference of the next difference: an error lasts one step, |m - w| <= one level of the last.
Wire:    (n-1)/n of the model's numbers, each about 0.53 bytes as gradient and 0.502 as update: an eighth of an
all-reduce. On m islands of k ranks (k-1)/k of them inside, 1.01 bytes as gradient, and (m-1)/m of a k-th of them
between, 0.53; updates 0.502 bytes on the same links.
State:   that of zero1, and the float32 rows: 4/n bytes per parameter.
Paper:   Jia et al., SDP4Bit, NeurIPS 2024, arXiv 2410.15526 (groups of 2048 for weights, of 128 and 512 for gradients).
Unlike the paper: the random numbers of rounding are keyed by step and rank; numbers are rotated back between the two
levels, which changes nothing but the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.exchange.codec import Codec
from gossamer.exchange.codec.hadamard import Hadamard
from gossamer.exchange.codec.int4 import Int4
from gossamer.exchange.codec.int8 import Int8
from gossamer.exchange.dense import Dense
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.two_shot import TwoShot
from gossamer.sharding import Sharding
from gossamer.sharding.zero1 import Zero1
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Sdp4bit(Sharding):
    """Sharded optimizer states (ZeRO stage 1) with quantized gradients and quantized weight updates.

    Gradients are quantized where plan.exchange is dense. Any other exchange, `shard_group` and `whole` work as in
    zero1.
    """

    weights: Codec | None = field(default_factory=lambda: Int4(block_size=2048, stochastic=True))
    gradients: Codec | None = field(default_factory=lambda: Hadamard(Int4(stochastic=True)))
    intra_gradients: Codec | None = field(default_factory=lambda: Hadamard(Int8(block_size=512, stochastic=True)))
    shard_group: Literal["all", "island"] = "all"
    whole: bool = False

    def __post_init__(self) -> None:
        coded = {"weights": self.weights, "gradients": self.gradients, "intra_gradients": self.intra_gradients}
        for name, codec in coded.items():
            if codec is not None and not codec.traits.fixed_size:
                do = "choose int4, int8, bfloat16 or float16"
                raise bad_input(wanted="a codec whose messages have a fixed size", got=repr(codec), do=do, key=name)

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def differences(self) -> Codec | None:
        return self.weights

    @property
    def by_parameter(self) -> bool:
        return self.whole

    @property
    def needs_islands(self) -> bool:
        return self.shard_group == "island"

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        return Zero1(self.shard_group).path(levels)

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        if isinstance(given, Dense):
            given = Dense() if self.gradients is None else TwoShot(self.gradients)
            if "island" in path:
                given = Hierarchical(given, self.intra_gradients)
        return Zero1(self.shard_group, self.whole).exchange(given, path)
