"""The messages of the rounds of the outer loop, and the exchanges that send them: pure functions of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gossamer.comm.bucket import Layout, as_float, partition
from gossamer.comm.message import ProcessGroups, Traffic
from gossamer.comm.row_gather import row_traffic
from gossamer.exchange import Exchange
from gossamer.exchange.codec.fp8 import Fp8
from gossamer.exchange.dense import Dense
from gossamer.exchange.two_shot import TwoShot
from gossamer.sync._fragments import fragments_of
from gossamer.sync._group_error import among_all
from gossamer.sync._outer_config import OuterLoopConfig


def traffic_of_round(
    loop: OuterLoopConfig,
    params: Mapping[str, Tensor],
    levels: ProcessGroups,
    rank: int,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
) -> tuple[Traffic, ...]:
    """Return the messages `rank` sends in `loop.cycle` steps, without gradients, weights, votes and status."""
    of_step, of_round = (tuple(row_traffic(numbers, 8, levels, levels.whole, rank)) for numbers in (2, 4))
    found = list(of_step) * (loop.cycle if loop.step_exchange is not None else 0)
    full, of_squares = among_all(Dense(), levels, keeps=False), exchange_of_second_moments(levels)
    for fragment in exchanges_of_round(loop, params, levels, units=units, bucket_bytes=bucket_bytes):
        found += of_round * loop.rounds
        for layout, exchange in fragment:
            rounds = [full if loop.meets_in_full(number) else exchange for number in range(loop.rounds)]
            rounds += [of_squares] * (
                loop.rounds // loop.average_second_moments_every if loop.average_second_moments_every else 0
            )
            for one in rounds:
                found += one.traffic(layout, levels, rank)
            if loop.step_exchange is not None:
                found += among_all(loop.step_exchange, levels, keeps=True).traffic(layout, levels, rank) * loop.cycle
    return tuple(found)


def exchange_of_second_moments(levels: ProcessGroups) -> Exchange:
    """Return the exchange that averages second moments over all ranks.

    The squares of a block differ by many powers of two, so the format has five bits of exponent (e5m2).
    """
    return among_all(TwoShot(Fp8("e5m2")), levels, keeps=False)


def exchanges_of_round(
    loop: OuterLoopConfig,
    params: Mapping[str, Tensor],
    levels: ProcessGroups,
    *,
    units: Sequence[str] = (),
    bucket_bytes: int,
) -> list[list[tuple[Layout, Exchange]]]:
    """Return, fragment by fragment, the buckets of the pseudo-gradients and the exchange of each."""
    exchange = among_all(loop.exchange, levels, keeps=loop.error_reset)
    return [
        [(as_float(layout), exchange) for layout in partition({n: params[n] for n in names}, bucket_bytes=bucket_bytes)]
        for names in fragments_of(params, loop.fragments, units)
    ]
