"""A precision that a device is slow in is trained in as asked, and the run says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer.model import precision
from gossamer.spec.records import Event, Start
from gossamer.view.run_directory import RunDirectory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize(("name", "is_told"), [("bf16", True), ("fp32", False)])
def test_a_slow_precision_is_told_with_the_unit_of_the_loss(
    name: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the caution is about processors")
    monkeypatch.setattr(precision, "_has_bf16", lambda: False)
    (tmp_path / "a.txt").write_text("some words, many times over. " * 60)
    config = {
        "train": {"steps": 1, "batch": 2, "precision": name, "evaluate_sequences": 1, "seconds": 60},
        "data": {"sequence": 16, "cache": str(tmp_path / "cache")},
        "run": {"directory": str(tmp_path / "runs"), "display": "quiet"},
    }
    done = gossamer.train(Net(), f"text:{tmp_path}/a.txt", config)
    records = list(RunDirectory(Path(done["directory"])).records())
    warnings = [one.message for one in records if isinstance(one, Event) and one.level == "warning"]
    assert any("bf16 saves memory here, not time" in said for said in warnings) is is_told
    (start,) = (one for one in records if isinstance(one, Start))
    assert (start.loss_unit, start.limit_s, done["loss_unit"]) == ("nats/token", 60.0, "nats/token")
