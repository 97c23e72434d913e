"""Recompute within a budget of bytes: planned on shapes alone, and kept by what the allocator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer import loss
from gossamer.model.source.hf import Hf
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from model.tiny import batch

SIZES = {"n_embd": 96, "n_layer": 6, "n_head": 4, "n_positions": 64}


def plan_of(savers: list[Any]) -> Plan:
    module = Hf("gpt2", SIZES).fitted_to_tokenizer(257, 64).build(0)
    rows = batch(rows=16, sequence=64)
    items = [{name: value[i] for name, value in rows.items()} for i in range(16)]
    config = RunConfig.model_validate({"train": {"batch": 8, "accumulate": 2}, "plan": {"savers": savers}})
    asked = PartitionRequest(
        config=config,
        ranks=1,
        rank=0,
        batches=DatasetBatches(items),
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    return planned(ModuleSource(module), asked).plan


def units_of(plan: Plan) -> list[str]:
    (saver,) = plan.savers
    assert isinstance(saver, dict)
    return saver["recompute"]["units"]


@pytest.mark.nightly
def test_a_smaller_budget_recomputes_more() -> None:
    with pytest.raises(BadInput, match=r"a budget of at least \d+ bytes") as raised:
        plan_of([{"recompute": {"budget": "10kB"}}])
    least = int(str(raised.value).split("at least ")[1].split()[0])
    counts = []
    for budget in (least, round(1.3 * least), 10**9):
        plan = plan_of([{"recompute": {"budget": f"{budget}B"}}])
        counts.append(len(units_of(plan)))
        assert plan.reasons["savers"].startswith(f"recompute of {counts[-1]} units: activations take")
    assert 6 >= counts[0] > counts[1] > counts[2] == 0
    with pytest.raises(BadInput, match=f"a budget of at least {least} bytes"):
        plan_of([{"recompute": {"budget": f"{least - 1}B"}}])


def test_savers_by_name_are_as_they_are_written() -> None:
    assert plan_of(["recompute"]).savers == ("recompute",)
    assert plan_of([]).savers == ()
