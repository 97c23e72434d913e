"""A stage that does not fit where it is to lie is refused before anything is built: which, where, by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.loss import Loss
from gossamer.partition import stage_memory
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import RankModel, build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

MIB = 2**20
LARGE, SMALL = 4 * 1024 * 1024 * 16, 1024 * 1024 * 16  # state of a stage: parameters, gradients and two slots


class Uneven(nn.Module):
    """Five layers of 1024 x 1024: four are the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Square(Loss):
    def __call__(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return output.square().mean()

    def weight(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.tensor(len(batch["x"]))


def held(monkeypatch: pytest.MonkeyPatch, room: int, *, ranks: int, local_ranks: int, rank: int = 0) -> RankModel:
    monkeypatch.setattr(stage_memory, "memory", lambda: (room, room))
    rows = DatasetBatches([{"x": torch.zeros(1024)} for _ in range(16)])  # type: ignore[arg-type]
    given = {"train": {"batch": 16}, "plan": {"mesh": {"pipe": 2}, "cuts": [0, 1]}}
    asked = PartitionRequest(
        config=RunConfig.model_validate(given),
        ranks=ranks,
        rank=rank,
        batches=rows,
        objective=Square(),
        device=torch.device("cpu"),
        local_ranks=local_ranks,
    )
    return build_rank_model(ModuleSource(Uneven()), asked)


def test_a_stage_alone_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput) as refused:
        held(monkeypatch, LARGE - MIB, ranks=2, local_ranks=1)
    said = str(refused.value)
    assert "memory for stage 1 (from layers.1): 64 MiB" in said and "ranks 1 to 1: 1 MiB too little" in said


@pytest.mark.parametrize(("ranks", "local_ranks"), [(2, 2), (4, 4), (4, 2)])
def test_all_that_lies_on_a_machine_counts(monkeypatch: pytest.MonkeyPatch, ranks: int, local_ranks: int) -> None:
    """Two replicas on one machine hold every stage twice, on two machines once."""
    together = local_ranks // 2 * (LARGE + SMALL)
    with pytest.raises(BadInput) as refused:
        held(monkeypatch, together - 1, ranks=ranks, local_ranks=local_ranks)
    assert f"of {local_ranks - 1} other stages" in str(refused.value)
    assert held(monkeypatch, together, ranks=ranks, local_ranks=local_ranks).cut is not None
