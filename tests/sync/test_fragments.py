"""What a fragment keeps while a round of it is under way."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.comm.bucket import partition
from gossamer.comm.message import ExchangeState, Outcome
from gossamer.sync._fragments import Fragment, FragmentBucket, PendingSync
from gossamer.sync.outer import OuterStep


@pytest.mark.parametrize(("mean", "kept"), [(0.5, 2.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_a_round_that_will_not_be_applied_leaves_no_residual(mean: float, kept: float) -> None:
    """What it sent was not taken, so the residual before it is what is still owed."""
    (layout,) = partition({"w": torch.zeros(3)}, bucket_bytes=1 << 20)
    before, after = (ExchangeState({"e": torch.full((3,), owed)}) for owed in (1.0, 2.0))
    part = FragmentBucket(layout, torch.zeros(3), before, torch.zeros(0), ExchangeState())
    arrived = Outcome(torch.tensor([0.0, mean, 0.0]), None, after)
    flight = PendingSync(3, OuterStep(0, 4.0, 0.4, (0, 0, 0)), True, None, (arrived,))
    own = Fragment([part], {}, flight=flight).own(0)
    assert own["rounds/e@w"].tolist() == [kept] * 3
