"""The planner of replicas, asked about parameters that are nowhere but in the question."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from gossamer import plan
from gossamer.plan import Request
from gossamer.sharding import UnshardOrder
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import BUCKET_BYTES, Plan

MIB = 1 << 20


def planned(mib: int, states: Any, *, ranks: int = 2) -> Plan:
    """For so much of float32 gradients."""
    config = RunConfig.model_validate(
        {"model": {"hf": "x"}, "data": {"source": "stdlib"}, "plan": {"sharding": states}}
    )
    module = nn.Linear(1024, mib * MIB // 4096, bias=False, device="meta")
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return plan.build("data_parallel").plan(Request(config, ranks, shapes=shapes, walk=UnshardOrder.of(module, ())))


@pytest.mark.parametrize("states", ["zero1", "zero2", "zero3"])
def test_what_is_under_way_is_little_of_what_sharded_states_save(states: str) -> None:
    """A 64th of the gradients, neither less than what keeps a line busy nor more than whole states take."""
    assert planned(512, states).bucket_bytes == 8 * MIB
    assert planned(16, states).bucket_bytes == 4 * MIB
    assert planned(64 * 1024, states).bucket_bytes == BUCKET_BYTES


def test_whole_states_have_large_buckets() -> None:
    assert planned(512, "none").bucket_bytes == BUCKET_BYTES
