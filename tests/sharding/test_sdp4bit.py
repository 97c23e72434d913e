"""SDP4Bit's differences of weights, against their equation in float64 over several updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exchange import crew
from gossamer import optimizer as optimizer_methods
from gossamer import sharding as sharding_methods
from gossamer.comm.bucket import Bucket
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import ProcessGroups
from gossamer.sharding.sdp4bit import Sdp4bit


def four_bits(x: np.ndarray) -> np.ndarray:
    """Seven levels to either side of the largest number."""
    scale = np.abs(x).max() / 7
    return scale * np.round(x / scale)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_was_lost_is_part_of_the_next_difference(ranks: int) -> None:
    """w <- w + D(Q(m - w)) on all ranks, m <- m - a g at the owner: the replica is the reference, and not the m of the
    step before, so that an error lasts one step.
    """
    sharding = sharding_methods.build({"sdp4bit": {"weights": {"int4": {"block_size": 65536}}}})
    levels, where = ProcessGroups.flat(ranks), crew.layout()
    deal = sharding.deal(levels)
    start = {n: v.clone() for n, v in Bucket(where, crew.bucket(where, 99).flat).slices()}
    params = [{n: v.clone() for n, v in start.items()} for _ in range(ranks)]
    rule = optimizer_methods.build({"sgd": {"lr": 0.5}})
    states = [
        sharding_methods.ShardedOptimizer.of(
            rule,
            p,
            deal,
            rank=r,
            holdings=sharding_methods.holdings(deal, sharding_methods.shapes_of(p), r),
            differences=sharding.differences,
        )
        for r, p in enumerate(params)
    ]
    m = np.concatenate([v.numpy().ravel() for v in start.values()]).astype(np.float64)
    w = m.copy()
    for step in range(6):
        gradients, factor = dict(crew.bucket(where, step).slices()), 1 / (1 + step)
        for one in states:
            one.update({n: one.own(n, g) for n, g in gradients.items()}, lr_scale=factor, step=step)
        methods = [one._moved(sharding.differences, (0, step), where) for one in states]  # type: ignore[arg-type]
        run_lockstep(LocalChannel.world(ranks, levels), methods)
        m -= 0.5 * factor * np.concatenate([g.numpy().ravel() for g in gradients.values()]).astype(np.float64)
        for rank in range(ranks):
            mine = np.concatenate([np.arange(at, at + n) for at, n in deal.part(where, rank)] or [np.zeros(0, int)])
            w[mine] += four_bits((m - w)[mine]) if len(mine) else 0.0
        for one in params:
            assert np.abs(np.concatenate([p.numpy().ravel() for p in one.values()]) - w).max() < 1e-5
    assert np.abs(m - w).max() > 0.01  # it is not that nothing was lost


def test_all_three_codes_are_right_on_average() -> None:
    one = Sdp4bit()
    assert all(code is not None and code.traits.unbiased for code in (one.weights, one.gradients, one.intra_gradients))
    assert torch.tensor([code.nbytes(1 << 20) / 2**20 for code in (one.weights, one.gradients, one.intra_gradients)]) \
        .tolist() == pytest.approx([0.5 + 4 / 2048, 0.5 + 4 / 128, 1 + 4 / 512], abs=1e-4)  # fmt: skip
