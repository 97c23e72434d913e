"""Validation sets of chats and mixtures through the command line, the best checkpoint of one, and what reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gossamer
from data.chats import chat_file, turns
from gossamer.spec.errors import BadInput
from system.command import InThisProcess, Place, records
from system.test_chats import settings as chat_settings
from system.test_data_factory import settings as factory_settings

pytestmark = pytest.mark.nightly  # whole runs by the command line, minutes in all; their parts are tested in tests/run


def settings(place: Place, **train: Any) -> dict[str, Any]:
    """A mixture is trained on; a part of it, chats, and another mixture are evaluated."""
    told = chat_settings(place)
    chat_file(place.folder / "asked.jsonl", *(turns(f"stone {n}", f"river {n}") for n in range(5)))
    own = {"chat": "chat:chats.jsonl", "text": "text:corpus/*.txt"}
    other = {"chat": "chat:asked.jsonl", "text": "text:corpus/0.txt"}
    told["data"] |= {
        "source": {"mixture": {"sources": own, "weights": {"chat": 1, "text": 2}}},
        "validation": {
            "part": 0.2,
            "asked": "chat:asked.jsonl",
            "both": {"mixture": {"sources": other, "weights": {"chat": 1, "text": 1}}},
        },
    }
    told["train"] = {"steps": 6, "evaluate_every": 2, "checkpoint_every": 2, "keep_checkpoints": 1, **train}
    return told


def test_every_set_is_evaluated_alike_on_one_process_and_on_two(place: Place) -> None:
    for processes in (1, 2):
        place.good("train", place.config(f"on{processes}", machines={"processes": processes}, **settings(place)))
    alone, together = (records(run, "evaluation") for run in place.runs())
    assert [(one["step"], one["name"]) for one in alone] == [
        (step, name) for step in (2, 4, 6) for name in ("part", "asked", "both")
    ]
    assert [one["loss"] for one in together] == pytest.approx([one["loss"] for one in alone], rel=1e-5)
    assert [one["bits_per_byte"] for one in together] == pytest.approx([one["bits_per_byte"] for one in alone], 1e-5)
    assert all(one["bits_per_byte"] > 0 for one in alone)


@pytest.fixture
def run(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    place.good("train", place.config(**settings(place, keep_best={"highest": "asked"})))
    monkeypatch.chdir(place.folder)
    (found,) = place.runs()
    best = records(found, "best")[-1]
    assert (best["name"], best["step"]) == ("asked", 2), "a loss that falls is highest at first"
    return found


def test_the_best_checkpoint_can_be_evaluated_spoken_with_and_exported(
    place: Place, run: Path, inside: InThisProcess
) -> None:
    for checkpoint, step in (("best", 2), ("latest", 6), (2, 2)):
        reported = {one["name"]: one["loss"] for one in records(run, "evaluation") if one["step"] == step}
        found = gossamer.evaluate(run, checkpoint=checkpoint)
        assert found["step"] == step
        assert {one["text"]: one["loss"] for one in found["texts"]} == pytest.approx(reported, rel=1e-6)
        assert {one["text"]: one["reported_loss"] for one in found["texts"]} == reported
        assert found["reported_loss"] is None, "there are several"
        assert gossamer.chat(run, checkpoint=checkpoint).step == step
    told = inside.good(place, "eval", run, "--checkpoint", "best")
    assert "for asked" in told.out and "this is the best checkpoint, of step 2" in told.err
    said = inside.good(place, "chat", run, "--checkpoint", "best", "--prompt", "stone", "--max-new-tokens", "3")
    assert "this is the best checkpoint, of step 2" in said.err
    inside.good(place, "export", run, "best", "--to", "hf", "--checkpoint", "best")
    files = ["asked.jsonl", "corpus/0.txt"]
    of_run, of_folder = gossamer.evaluate(run, files, checkpoint=2), gossamer.evaluate("best", files, sequence=256)
    assert of_folder["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    with pytest.raises(BadInput, match="--checkpoint: wanted a run, which has checkpoints, got best with the model"):
        gossamer.evaluate("best", files, checkpoint="best")
    with pytest.raises(BadInput, match="--checkpoint: wanted a run"):
        gossamer.chat("best", checkpoint=2)


def test_a_dry_run_counts_the_sequences_of_every_set(place: Place) -> None:
    told = place.good("train", place.config(**settings(place)), "--dry-run", "--json").last()
    assert list(told["data"]["validation"]) == ["part", "asked", "both"]


@pytest.mark.parametrize(
    ("section", "told", "said"),
    [
        (
            "data",
            {"validation": {"books": "text:corpus/*.txt"}},
            "data.validation: wanted data from data.validation",
        ),
        ("train", {"keep_best": True}, "train.keep_best: wanted validation data, which text alone has"),
        ("train", {"early_stop": {"patience": 2}}, "train.early_stop.patience: wanted validation data, which text"),
    ],
)
def test_a_dataset_of_a_factory_has_no_validation_sets(
    place: Place, section: str, told: dict[str, Any], said: str
) -> None:
    config = factory_settings(place)
    config[section] |= told
    (place.folder / "own.yaml").write_text(json.dumps(config))
    done = place.run("train", "own.yaml")
    assert done.code == 2 and said in done.err, done.err
