"""Training through the command line on a dataset that the user's Python code builds in every process."""

from __future__ import annotations

import json
from typing import Any

import pytest

import gossamer
from gossamer.job.training_data import of_factory
from gossamer.spec.errors import BadInput
from system.command import InThisProcess, Place, losses

CODE = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Points(Dataset):
    def __init__(self, count, scale):
        generator = torch.Generator().manual_seed(1)
        self.x = scale * torch.randn(count, 4, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}

def points(count=64, scale=1.0):
    return Points(count, scale)

def text(count=64):
    return "no dataset"

def broken():
    return [{"x": torch.zeros(4)}, 1 / 0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        return self.inner(x)
"""


def settings(place: Place, **data: Any) -> dict[str, Any]:
    (place.folder / "own.py").write_text(CODE)
    config = json.loads(place.config().read_text())
    config["model"] = {"factory": "own:Net"}
    config["data"] = {"factory": "own:points", **data}
    config["train"] |= {"steps": 12, "batch": 8, "loss": "classification", "optimizer": {"adamw": {"lr": 0.05}}}
    return dict(config)


@pytest.mark.nightly
def test_it_trains_alike_on_one_process_and_on_two(place: Place) -> None:
    for processes in (1, 2):
        told = settings(place, config={"count": 96})
        (place.folder / "own.yaml").write_text(json.dumps({**told, "machines": {"processes": processes}}))
        place.good("train", "own.yaml", "--json")
    alone, together = place.runs()
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(alone)[12] < losses(alone)[1]
    place.good("train", "own.yaml", "--dry-run")


@pytest.mark.nightly
def test_a_run_is_resumed_and_loaded_without_any_text(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "own.yaml").write_text(json.dumps(settings(place)))
    place.good("train", "own.yaml", "--json")
    (run,) = place.runs()
    place.good("resume", run, "train.steps=16", "--json")
    assert sorted(losses(run)) == [*range(1, 17)]
    monkeypatch.chdir(place.folder)
    found = gossamer.load(run)
    assert found.step == 16 and found.tokenizer is None
    changed = place.run("resume", run, "train.steps=20", "data.config.scale=2.0")
    assert changed.code == 2 and "data" in changed.err


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"source": "text:corpus/*.txt"}, "data.source: wanted data from data.source or from data.factory"),
        ({"pack": False}, "data.pack: wanted data from data.pack or from data.factory"),
        ({"factory": None, "config": {"count": 3}}, "data.config: wanted data.factory, whose arguments these are"),
        ({"factory": "own:pints"}, "own has no function 'pints': did you mean 'points'"),
        pytest.param(
            {"factory": "own"}, "data.factory: wanted \"package.module:function\", got 'own'", marks=pytest.mark.nightly
        ),
        pytest.param(
            {"config": {"cuont": 3}}, "data.config: wanted arguments of own:points", marks=pytest.mark.nightly
        ),
        pytest.param(
            {"factory": "own:text"},
            "data.factory: wanted a map-style dataset of dictionaries, got a str",
            marks=pytest.mark.nightly,
        ),
        ({"factory": "own:broken"}, "got ZeroDivisionError: division by zero at"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    place: Place, inside: InThisProcess, told: dict[str, Any], said: str
) -> None:
    (place.folder / "own.yaml").write_text(json.dumps(settings(place, **told)))
    done = inside.run(place, "train", "own.yaml")
    assert done.code == 2 and said in done.err, done.err


def test_its_fingerprint_notices_changed_arguments_code_and_items(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place.folder))
    (place.folder / "mine.py").write_text(CODE)

    def fingerprint(**arguments: Any) -> str:
        return of_factory("mine:points", arguments).description.fingerprint

    first = fingerprint(count=8)
    assert fingerprint(count=8) == first
    assert fingerprint(count=9) != first and fingerprint(count=8, scale=2.0) != first
    (place.folder / "mine.py").write_text(CODE + "# changed\n")
    assert fingerprint(count=8) != first
    with pytest.raises(BadInput, match="did you mean 'count'"):
        fingerprint(cuont=8)
