"""`gossamer sweep` with real runs: it ranks, goes on, tells failures, and halves."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from system.command import SIZES, Place, eventually, records

pytestmark = pytest.mark.nightly  # whole runs by the command line, minutes in all; their parts are tested in tests/run


def journal(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_it_ranks_by_the_validation_of_its_runs_and_runs_nothing_twice(place: Place) -> None:
    config = place.config()
    words = ("sweep", config, "train.optimizer.adamw.lr=1e-5,1e-2", "--seeds", "2", "--jobs", "2", "--json")
    told = place.good(*words).last()
    best, other = told["points"]
    assert best["overrides"] == ["train.optimizer.adamw.lr=1e-2"] and best["mean"] < other["mean"]
    assert len(best["values"]) == 2 and best["spread"] > 0
    reported = records(place.folder / best["best"], "evaluation")[-1]
    assert reported["bits_per_byte"] == min(best["values"])
    again = place.good(*words)
    assert again.last()["points"] == told["points"] and "4 of 4 trials are done already" in again.err
    assert len(journal(place.folder / told["folder"])) == 4


def test_a_trial_that_fails_is_explained_and_the_others_go_on(place: Place) -> None:
    config = place.config(model={"hf": "llama", "config": SIZES})
    done = place.good("sweep", config, "model.config.hidden_act=silu,nonsense", "model.config.num_hidden_layers=1")
    table = done.out.splitlines()
    assert "1 failed" in table[0] and "silu" in table[2] and "nonsense" in table[3] and "failed" in table[3]
    assert any(line.startswith("failed: model.config.hidden_act=nonsense") for line in table)


def test_where_all_fail_the_sweep_fails_with_the_reason(place: Place) -> None:
    done = place.run("sweep", place.config(), "data.source=text:no/*.txt,text:none/*.txt", "--json")
    assert done.code == 3 and "all 2 trials failed" in done.last()["error"]
    assert "no file matches 'no/*.txt'" in done.last()["error"]


def test_halving_trains_the_better_half_on(place: Place) -> None:
    config = place.config()
    told = place.good("sweep", config, "train.optimizer.adamw.lr=1e-5,1e-2", "--halving", "--json").last()
    assert [(one["overrides"][0].partition("=")[2], one["steps"]) for one in told["points"]] == [
        ("1e-2", 4),
        ("1e-5", 2),
    ]
    assert told["trials"] == 3


def test_a_sweep_that_is_stopped_goes_on_where_it_was(place: Place) -> None:
    (place.folder / "hold").write_text("3")
    config = place.config(model={"factory": "watched:make"}, train={"steps": 40})
    words = ("sweep", config, "train.batch=4,8", "--folder", "s", "--json")
    process = place.start(*words)
    eventually(lambda: (place.folder / "held-0").exists(), "the third step", within_s=120)
    process.send_signal(signal.SIGINT)
    (place.folder / "hold").unlink()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 4 and "the same command goes on" in err, err
    assert not (place.folder / "s/journal.jsonl").exists()
    told = place.good(*words).last()
    assert told["failed"] == 0 and len(told["points"]) == 2
    (first,) = (place.folder / "s/trials/000-seed0-40steps").iterdir()
    start, again = records(first, "start")
    assert start["step"] == 0 < again["step"], "it went on from its checkpoint"


def test_a_sampler_chooses_points_and_a_search_goes_on_where_it_was(place: Place) -> None:
    pytest.importorskip("optuna")
    words = ("sweep", place.config(), "train.optimizer.adamw.lr=1e-5..1e-1:log", "train.batch=2,4")
    words = (*words, "--sampler", "tpe", "--folder", "s", "--json")
    told = place.good(*words, "--points", "3", "--jobs", "2").last()
    assert (told["sampler"], told["trials"], told["failed"], len(told["points"])) == ("tpe", 3, 0, 3)
    assert told["points"][0]["mean"] <= told["points"][1]["mean"] <= told["points"][2]["mean"]
    before = (place.folder / "s/points.jsonl").read_text()
    more = place.good(*words, "--points", "4")
    assert "3 of 3 trials are done already" in more.err and more.last()["trials"] == 4
    assert (place.folder / "s/points.jsonl").read_text().startswith(before)
    assert len(journal(place.folder / "s")) == 4
