"""What `gossamer.train` is given in Python that cannot work is one sentence, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.spec.errors import BadInput
from gossamer.spec.records import Start


class Net(nn.Module):
    def __init__(self, rows: int = 257, places: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 8), nn.Linear(8, 257)
        self.places = nn.Embedding(places, 8) if places else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(torch.arange(input_ids.shape[1]))
        return self.head(x)  # type: ignore[no-any-return]


class Bare(nn.Module):
    """An embedding that is no module."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.zeros(rows, 8)), nn.Linear(8, 257)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.embedding(input_ids, self.table))  # type: ignore[no-any-return]


def make() -> Net:
    return Net()


ROWS = [{"input_ids": torch.full((16,), i), "labels": torch.full((16,), i)} for i in (3, 200, 7, 9)]


def refused(tmp_path: Path, model: Any, data: Any = "", config: Any = None) -> str:
    (tmp_path / "text.txt").write_text("letters and words, " * 400)
    sections = {
        "train": {"steps": 2, "batch": 4, "evaluate_every": 0},
        "data": {"sequence": 16, "validation": 0, "cache": str(tmp_path)},
        "run": {"directory": str(tmp_path), "display": "quiet"},
    }
    with pytest.raises(BadInput) as caught:
        gossamer.train(model, data or f"text:{tmp_path}/*.txt", sections if config is None else config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Net, "model: wanted a model, got the class Net: give an instance: Net(...)"),
        (make, "model: wanted a model, got a function: give what it returns, or {'factory': 'package.module:make'}"),
        (3, "model: wanted a model, got an int: give a module"),
        (None, "model: wanted a model, got a NoneType: give a module"),
        ({"hf": "llama", "nosuch": 1}, "model.nosuch: there is no such key"),
    ],
)
def test_no_model(tmp_path: Path, model: Any, said: str) -> None:
    assert refused(tmp_path, model).startswith(said)


@pytest.mark.parametrize("config", [[1], 7, {"train"}])
def test_no_configuration(tmp_path: Path, config: Any) -> None:
    said = f"config: wanted a mapping of sections, a RunConfig, or the path of a file, got {type(config).__name__}"
    assert refused(tmp_path, Net(), config=config).replace("got a ", "got ").replace("got an ", "got ").startswith(said)


def test_an_optimizer_that_is_there_already(tmp_path: Path) -> None:
    made = torch.optim.AdamW(Net().parameters())
    for given, got in ((made, "an AdamW"), (torch.optim.AdamW, "the class AdamW")):
        said = refused(tmp_path, Net(), config={"train": {"optimizer": given}})
        assert said.startswith(
            "train.optimizer: wanted a number, a text, a list or a mapping, as in a file, got " + got
        )
        assert "{'adamw': {...}}" in said and "\n" not in said


@pytest.mark.parametrize("data", [3, {"input_ids": [1]}, iter(ROWS)])
def test_no_data(tmp_path: Path, data: Any) -> None:
    assert refused(tmp_path, Net(), data).startswith(
        "data: wanted a source as in data.source, a Corpus, or a map-style"
    )


@pytest.mark.parametrize("way", ["in the configuration", "as an argument", "as a mapping"])
def test_the_source_that_is_given_is_the_one_that_is_read(tmp_path: Path, way: str) -> None:
    (tmp_path / "text.txt").write_text("letters and words, " * 400)
    files = f"{tmp_path}/*.txt"
    config = {
        "train": {"steps": 1, "batch": 4, "evaluate_every": 0},
        "data": {"sequence": 16, "validation": 0, "cache": str(tmp_path / "cache")},
        "run": {"directory": str(tmp_path / "runs"), "display": "quiet"},
    }
    data: Any = f"text:{files}" if way == "as an argument" else {"text": {"files": files}}
    if way == "in the configuration":
        config["data"]["source"], data = data, None
    run = gossamer.train(Net(), data, config).run
    assert files in str(run.config().data.source)
    (started,) = (record for record in run.records() if isinstance(record, Start))
    assert files in started.data


@pytest.mark.parametrize("model", [Net(100), Bare(100)])
def test_a_vocabulary_below_the_data_s(tmp_path: Path, model: nn.Module) -> None:
    """The first sequence of the rows would fit."""
    assert refused(tmp_path, model, ROWS).startswith(
        "data.tokenizer: the model has 100 token ids, the data has token 200"
    )
    assert refused(tmp_path, model).startswith("data.tokenizer: the model has 100 token ids, the ")


def test_a_vocabulary_below_the_tokenizer_s_though_the_text_would_fit(tmp_path: Path) -> None:
    assert "the model has 200 token ids, the tokenizer gives 257: build it with" in refused(tmp_path, Net(200))


def test_fewer_places_than_a_sequence_has(tmp_path: Path) -> None:
    assert "data.sequence: sequences have 16 tokens, the model takes 4" in refused(tmp_path, Net(places=4))


def test_an_index_error_of_the_user_s_own_stays_one(tmp_path: Path) -> None:
    class Wrong(Net):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            [][1]
            return super().forward(input_ids)

    with pytest.raises(IndexError, match="list index"):
        refused(tmp_path, Wrong())
