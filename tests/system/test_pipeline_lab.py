"""Four stages on four hosts behind slow links: the losses of one process, and exactly the bytes of the forecast."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from gossamer.netlab import lab_unavailable
from system.command import Place, losses, records

pytestmark = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]

STEPS, STAGES, BATCHES = 6, 4, 4
SEQUENCE, WIDTH = 128, 128
ROWS = 8  # sequences per step
TENSORS = 2 * (STAGES - 1) * ROWS * SEQUENCE * WIDTH * 4  # bytes over all borders, there and back, in float32

MODEL = f"""
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({WIDTH})
        self.up, self.down = nn.Linear({WIDTH}, {2 * WIDTH}), nn.Linear({2 * WIDTH}, {WIDTH})

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, {WIDTH})
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear({WIDTH}, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""


def config(place: Place, name: str, plan: Mapping[str, Any]) -> str:
    return str(
        place.config(
            name,
            model={"factory": "plain:Model"},
            data={"sequence": SEQUENCE, "validation": 0},
            train={"prove": "never", "steps": STEPS, "batch": ROWS, "accumulate": BATCHES, "checkpoint_every": 0},
            plan=plan,
            run={"name": name},
        )
    )


def in_the_lab(place: Place, name: str, boundary: Any) -> dict[str, Any]:
    """What `gossamer lab run --json` says of a run in four stages."""
    file = config(place, name, {"mesh": {"pipe": STAGES}, "activation_compression": boundary})
    lab = ("lab", "run", "--hosts", str(STAGES), "--rate", "100mbit", "--json", "--")
    about = place.good(*lab, sys.executable, "-m", "gossamer", "train", file).last()
    assert about["exit_codes"] == [0] * STAGES
    return about


def forecast_of(place: Place, name: str) -> dict[str, int]:
    """Bytes of a step by link; that what rank 0 metered is the same in every step."""
    run = place.folder / "runs" / name
    forecast = yaml.safe_load((run / "plan.yaml").read_text())["forecast"]["wire_bytes"]
    mine = {link: count for link, count in forecast.items() if link.startswith("0>")}
    metered = [step["wire_bytes"] for step in records(run, "step")]
    assert metered == [mine] * STEPS
    assert isinstance(forecast, dict)
    return forecast


def boundary_bytes(forecast: Mapping[str, int]) -> int:
    """Of a step. Votes go round: the last rank sends the first nothing else, and every rank sends as many."""
    return sum(forecast.values()) - STAGES * forecast[f"{STAGES - 1}>0"]


@pytest.mark.nightly
def test_four_stages_train_what_one_process_trains(place: Place) -> None:
    (place.folder / "plain.py").write_text(MODEL)
    place.good("train", config(place, "alone", {}))
    expected = losses(place.runs()[0])
    about = in_the_lab(place, "exact", "none")
    assert losses(place.folder / "runs" / "exact") == pytest.approx(expected, rel=1e-5)
    forecast = forecast_of(place, "exact")
    assert boundary_bytes(forecast) == TENSORS, "one tensor a border, and nothing that a stage could make itself"
    payload = STEPS * sum(forecast.values())
    counted = sum(link["tx"] for link in about["bytes_per_link"].values())
    assert payload < counted < 1.02 * payload

    in_the_lab(place, "int8", {"codec": {"codec": "int8"}})
    assert losses(place.folder / "runs" / "int8") == pytest.approx(expected, rel=1e-3)
    assert losses(place.folder / "runs" / "int8") != losses(place.folder / "runs" / "exact")
    assert 3.6 * boundary_bytes(forecast_of(place, "int8")) < TENSORS
