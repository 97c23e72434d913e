"""What a state_dict has beside tensors is in no checkpoint: to go on without it is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import gossamer
from gossamer.spec.errors import BadInput


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(6) + index
        return {"input_ids": ids, "labels": ids}


class Counts(nn.Linear):
    """Keeps a counter in its state_dict."""

    count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) / self.count


def small() -> nn.Module:
    return nn.Sequential(nn.Embedding(32, 4), Counts(4, 4), nn.Linear(4, 32))


def test_a_run_with_more_than_tensors_is_trained_and_not_gone_on_with(tmp_path: Path) -> None:
    run = {"directory": str(tmp_path), "name": "one", "display": "quiet"}
    config = {"train": {"steps": 2, "batch": 4, "accumulate": 1}, "run": run}
    gossamer.train(small(), Rows(), config)
    with pytest.raises(BadInput, match=r"got 1 \(Counts\) with get_extra_state, which no checkpoint saves"):
        gossamer.train(small(), Rows(), {**config, "train": {"steps": 2, "batch": 4, "accumulate": 1}}, resume="auto")
