"""`gossamer eval`: the loss that training reported, that of plain torch, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import gossamer
from data.chats import chat_file, turns
from gossamer.spec.errors import BadInput
from system.command import SIZES, InThisProcess, Place, records
from system.test_chats import settings

pytestmark = pytest.mark.nightly  # whole runs by the command line, minutes in all; their parts are tested in tests/run

CHANGES: dict[str, dict[str, Any]] = {
    "on two processes": {"machines": {"processes": 2}},
    "islands apart": {
        "machines": {"processes": 2, "islands": [[0], [1]]},
        "plan": {"sync": {"diloco": {"sync_every": 2}}},
    },
    "a tokenizer that was trained": {
        "data": {"tokenizer": "bpe:300"},
        "model": {"hf": "llama", "config": {**SIZES, "vocab_size": 300}},
    },
    "in bf16": {"train": {"precision": "bf16"}},
    "an adapter": {"model": {"hf": "llama", "config": SIZES, "adapter": "lora"}},
}


@pytest.fixture(autouse=True)
def in_its_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_it_finds_the_loss_that_training_reported(place: Place, changes: dict[str, Any]) -> None:
    place.good("train", place.config(**changes))
    (run,) = place.runs()
    reported = records(run, "evaluation")[-1]
    found = gossamer.evaluate(run)
    assert found["step"] == reported["step"] == 4
    assert found["loss"] == pytest.approx(reported["loss"], rel=1e-6) == found["reported_loss"]
    assert found["bits_per_byte"] == pytest.approx(reported["bits_per_byte"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(reported["loss"]), rel=1e-5)


def test_of_chats_the_answers_alone_count(place: Place) -> None:
    place.good("train", place.config(**settings(place)))
    (run,) = place.runs()
    assert gossamer.evaluate(run)["loss"] == pytest.approx(records(run, "evaluation")[-1]["loss"], rel=1e-6)
    chat_file(place.folder / "two.jsonl", turns("stone", "river lamp"), turns("lamp", "green"))
    found = gossamer.evaluate(run, ["two.jsonl"])
    assert found["bytes"] == len("river lamp" + "green")
    assert found["labels"] > found["bytes"] // 4 and found["sequences"] == 2


@pytest.fixture
def run(place: Place) -> Path:
    place.good("train", place.config())
    return place.runs()[0]


def test_on_files_it_is_the_mean_of_plain_torch(place: Place, run: Path) -> None:
    files = [place.text("a.txt", words=30, seed=91), place.text("b [1].txt", words=3, seed=92)]
    module, nats, count = gossamer.load(run).module, 0.0, 0
    for file in files:
        ids = torch.tensor([*file.read_bytes(), 256])
        for start in range(0, len(ids) - 1, 31):  # windows of 32 tokens overlap by one
            window = ids[start : start + 32]
            with torch.no_grad():
                logits = module(window[None, :-1]).logits[0]
            nats += float(cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    found = gossamer.evaluate(run, files)
    size = sum(file.stat().st_size for file in files)
    assert found["labels"] == count and found["bytes"] == size - len(files)  # a file's first byte follows nothing
    assert found["loss"] == pytest.approx(nats / count, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-6)
    assert [one["text"] for one in found["texts"]] == [str(file) for file in files]


def test_an_exported_folder_and_gguf_file_have_the_loss_of_their_run(place: Place, run: Path) -> None:
    gossamer.export(run, "hf")
    gossamer.export(run, "model.gguf", to="gguf")
    of_run = gossamer.evaluate(run, ["corpus/*.txt"])
    of_folder = gossamer.evaluate("hf", ["corpus/*.txt"], sequence=32)
    of_gguf = gossamer.evaluate("model.gguf", ["corpus/*.txt"], sequence=32)
    assert of_folder["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert of_gguf["loss"] == pytest.approx(of_run["loss"], rel=1e-3)  # its matrices are in 16 bits
    assert of_run["labels"] == of_folder["labels"] == of_gguf["labels"]


def test_it_answers_from_any_folder_in_a_table_and_in_json(
    place: Place, run: Path, tmp_path: Path, inside: InThisProcess
) -> None:
    (tmp_path / "notes.txt").write_text("seven green stones")
    for words in ((), (str(tmp_path / "notes.txt"),)):
        told = inside.good(place, "eval", run.resolve(), *words, "--json").last()
        assert told["model"] == str(run.resolve()) and told["loss"] > 0
    done = inside.good(place, "eval", run, "corpus/0.txt", "corpus/1.txt")
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == ["text", "corpus/0.txt", "corpus/1.txt", "all"]


def test_a_model_that_is_none_is_refused_with_what_is_there(place: Place) -> None:
    for name, got in (("corpus", "a folder with neither records.jsonl nor config.json"), ("nowhere", "no such file")):
        with pytest.raises(BadInput, match=got):
            gossamer.evaluate(name, ["corpus/0.txt"])


def test_texts_that_are_missing_empty_or_damaged_are_named(place: Place, run: Path) -> None:
    (place.folder / "empty.jsonl").write_text("\n")
    (place.folder / "damaged.jsonl").write_text('{"text": \n')
    for name, said in (
        ("nothing.txt", "there is no file nothing.txt"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("damaged.jsonl", "damaged.jsonl:1"),
        ("corpus", "the folder corpus"),
    ):
        with pytest.raises(BadInput, match=said):
            gossamer.evaluate(run, [name])


def test_text_that_changed_since_the_run_is_not_evaluated_in_silence(place: Place, run: Path) -> None:
    place.text("corpus/6.txt", words=50, seed=7)
    with pytest.raises(BadInput, match="1 file is new"):
        gossamer.evaluate(run)


def test_a_model_without_a_run_needs_files(place: Place, run: Path) -> None:
    gossamer.export(run, "hf")
    with pytest.raises(BadInput, match="only a run has a text of its own"):
        gossamer.evaluate("hf")
