"""Before anything is measured: the bubble of equal stages, the micro-batches under way, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gossamer import loss
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}


class Net(nn.Module):
    """Four blocks of equal work, beside parts that do next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 4096), nn.Linear(4096, 2)) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def plan_of(**asked: object) -> Plan:
    values = {"train": {"batch": 8, "accumulate": 8}, "plan": {"mesh": {"pipe": 4}, **asked}}
    request = PartitionRequest(
        config=RunConfig.model_validate(values),
        ranks=4,
        rank=0,
        batches=DatasetBatches(Rows()),
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    return build_rank_model(ModuleSource(Net()), request).plan


@pytest.mark.parametrize(
    ("schedule", "bubble", "live"),
    [("gpipe", 27, "8, 8, 8, 8"), ("one_f_one_b", 27, "4, 3, 2, 1")],
)
def test_a_plan_says_what_is_known_and_what_is_not(schedule: str, bubble: int, live: str) -> None:
    """(p - 1) / (m + p - 1) of 4 stages and 8 micro-batches is 27%."""
    plan = plan_of(pipeline_schedule=schedule)
    said = plan.reasons["pipeline_schedule"]
    assert said.startswith(f"bubble: {bubble}% of a step"), said
    assert f"at most {live} micro-batches" in said and "Not measured" in said
    assert plan.forecast.step_s == plan.forecast.bubble_s == 0.0 and plan.forecast.peak_bytes == ()
    assert plan.forecast.wire_bytes, "bytes are known"
