"""Preference optimization through the command line: in one process, in replicas, in stages, with adapters."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from data.chats import tokenizer_folder
from system.command import SIZES, WORDS, Place, losses, records

pytestmark = pytest.mark.nightly  # whole runs by the command line, minutes in all; their parts are tested in tests/run


def settings(place: Place, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    choose = random.Random(5)
    lines = [
        {name: " ".join(choose.choices(WORDS, k=choose.randint(1, 5))) for name in ("prompt", "chosen", "rejected")}
        for _ in range(30)
    ]
    (place.folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    tokenizer_folder(place.folder / "words", "zephyr")
    return {
        "model": {"hf": "llama", "config": {**SIZES, "vocab_size": 260}, **sections.get("model", {})},
        "data": {"source": "pairs:pairs.jsonl", "tokenizer": "hf:words", "sequence": 128, "validation": 0.2},
        "train": {
            "batch": 8,
            "loss": {"dpo": {"beta": 0.5}},
            "optimizer": {"adamw": {"lr": 0.01}},
            **sections.get("train", {}),
        },
    }


def said(run: Any) -> list[str]:
    return [one["message"] for one in records(run, "event") if one["message"].startswith("reference")]


@pytest.mark.parametrize("model", [{}, {"adapter": {"lora": {"rank": 4}}}])
def test_replicas_and_stages_train_as_one_process_does(place: Place, model: dict[str, Any]) -> None:
    told = settings(place, model=model)
    for processes, pipe in ((1, 1), (2, 1), (2, 2)):
        config = place.config(
            f"{processes}{pipe}", **told, machines={"processes": processes}, plan={"mesh": {"pipe": pipe}}
        )
        place.good("train", config)
    alone, replicas, stages = place.runs()
    assert losses(alone)[1] == pytest.approx(math.log(2), abs=1e-6), "the model is its own reference before step 1"
    assert losses(alone)[4] < losses(alone)[2]
    assert losses(replicas) == pytest.approx(losses(alone), rel=1e-4)
    assert losses(stages) == pytest.approx(losses(alone), rel=1e-4)
    held_out = [records(run, "evaluation")[-1] for run in (alone, replicas, stages)]
    assert [one["loss"] for one in held_out] == pytest.approx([held_out[0]["loss"]] * 3, rel=1e-4)
    assert all(one["bits_per_byte"] is None for one in held_out)


SGD = {"optimizer": {"sgd": {"lr": 0.005}}, "max_grad_norm": 0.0, "lr_schedule": "constant"}
ISLANDS = {"plan": {"sync": {"local_sgd": {"sync_every": 1}}}, "machines": {"islands": [[0], [1]]}}  # = plain averaging


@pytest.mark.parametrize("model", [{}, {"adapter": {"lora": {"rank": 4}}}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "sections",
    [{"plan": {"sharding": "zero1"}}, {"plan": {"sharding": "zero3"}}, ISLANDS],
    ids=["zero1", "zero3", "islands"],
)
def test_sharded_states_and_islands_train_as_one_process_does(
    place: Place, model: dict[str, Any], sections: dict[str, dict[str, Any]]
) -> None:
    """Islands that meet after every step of plain SGD average what one process would have averaged as gradients."""
    told = settings(place, model=model, train=SGD)
    place.good("train", place.config("alone", **told))
    machines = {"processes": 2, **sections.get("machines", {})}
    place.good("train", place.config("together", **told, **{**sections, "machines": machines}))
    alone, together = place.runs()
    assert losses(alone)[1] == pytest.approx(math.log(2), abs=1e-6) and abs(losses(alone)[4] - losses(alone)[1]) > 1e-3
    if sections is not ISLANDS:  # whose losses are each island's own
        assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    held_out = [records(run, "evaluation")[-1]["loss"] for run in (alone, together)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5) and abs(held_out[0] - math.log(2)) > 1e-3


def test_a_resume_reads_what_was_computed_before_step_1(place: Place) -> None:
    told = settings(place, train={"lr_schedule": "constant"})
    for steps in (6, 3):
        told["train"]["steps"] = steps
        place.good("train", place.config(**told))
    whole, part = place.runs()
    place.good("resume", part, "train.steps=6")
    first, again = said(part)
    assert "by the initial model" in first and "answers, from reference-" in again
    assert losses(part) == pytest.approx(losses(whole), rel=1e-5)
    assert {one["loss_unit"] for one in records(part, "start")} == {"nats/pair"}
    (kept,) = part.glob("reference-*.safetensors")
    kept.unlink()
    place.good("resume", part, "train.steps=7", "machines.processes=2")
    assert "by the initial model" in said(part)[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"loss": "next_token"}}, "wanted a loss that compares two answers"),
        ({"data": {"source": "text:corpus/*.txt"}}, "wanted preference pairs (data.source pairs:GLOB)"),
        ({"train": {"batch": 7}}, "wanted micro-batches of a multiple of 2 sequences"),
        ({"train": {"accumulate": 3}}, "wanted micro-batches of a multiple of 2 sequences"),
    ],
)
def test_what_does_not_belong_together_is_refused(place: Place, change: dict[str, Any], message: str) -> None:
    told = settings(place)
    done = place.run("train", place.config(**{name: {**told[name], **change.get(name, {})} for name in told}))
    assert done.code == 2 and message in done.err, done.err
