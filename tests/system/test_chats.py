"""Fine-tuning on conversations through the command line: on one process and on two, with equal losses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from data.chats import chat_file, tokenizer_folder, turns
from system.command import SIZES, WORDS, Place, losses, records


def chats(place: Place, count: int = 40) -> Path:
    choose = random.Random(7)
    said = [
        turns(*(" ".join(choose.choices(WORDS, k=choose.randint(1, 6))) for _ in range(2 * choose.randint(1, 3))))
        for _ in range(count)
    ]
    return chat_file(place.folder / "chats.jsonl", *said)


def settings(place: Place, kind: str = "zephyr", **data: Any) -> dict[str, Any]:
    chats(place)
    tokenizer_folder(place.folder / "words", kind)
    told = {"source": "chat:chats.jsonl", "tokenizer": "hf:words", "sequence": 256, "validation": 0.2, **data}
    return {"model": {"hf": "llama", "config": {**SIZES, "vocab_size": 260}}, "data": told}


@pytest.mark.parametrize("pack", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_conversations_train_alike_on_one_process_and_on_two(place: Place, pack: bool) -> None:
    told = settings(place, pack=pack)
    for processes in (1, 2):
        config = place.config(f"on{processes}", machines={"processes": processes}, **told)
        place.good("train", config, "--json")
    alone, together = place.runs()
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    one, two = (records(run, "evaluation")[-1] for run in (alone, together))
    assert one["bits_per_byte"] == pytest.approx(two["bits_per_byte"], rel=1e-5)
    assert one["bits_per_byte"] > 0 and losses(alone)[4] < losses(alone)[1]


def test_a_preview_shows_the_answers_that_are_learnt(place: Place) -> None:
    said = place.good("train", place.config(**settings(place)), "--dry-run", "--json").last()
    for sample in said["samples"]:
        assert all(part.endswith("</s>") and part in sample["text"] for part in sample["learnt"])
        assert len(sample["learnt"]) == sample["text"].count("<|assistant|>") > 0
        assert sample["labels"] < sample["tokens"]


def test_what_is_wrong_with_a_chat_is_told_before_anything_starts(place: Place) -> None:
    config = place.config(**settings(place))
    with (place.folder / "chats.jsonl").open("a") as stream:
        stream.write('{"messages": [{"role": "user", "content": "q"}, {"role": "bot", "content": "a"}]}\n')
    done = place.run("train", config)
    assert done.code == 2
    assert "chats.jsonl:41, got 'bot'" in done.err and done.err.count("data.source") == 1


@pytest.mark.nightly
def test_a_mixture_goes_on_where_it_was_on_another_number_of_processes(place: Place) -> None:
    told = settings(place)
    sources = {"chat": told["data"]["source"], "text": "text:corpus/*.txt"}
    told["data"]["source"] = {"mixture": {"sources": sources, "weights": {"chat": 1, "text": 2}}}
    for steps in (6, 3):
        place.good("train", place.config(train={"steps": steps, "lr_schedule": "constant"}, **told))
    whole, part = place.runs()
    place.good("resume", part, "machines.processes=2", "train.steps=6")
    assert [tuple(step["samples"]) for step in records(part, "step")] == [(4 * n, 4 * n + 4) for n in range(6)]
    assert losses(part) == pytest.approx(losses(whole), rel=1e-4)
