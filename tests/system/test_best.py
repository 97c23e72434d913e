"""The best checkpoint of a run and its early end, as a user of the command sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

import gossamer
from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from system.command import InThisProcess, Place, records

pytestmark = pytest.mark.nightly  # whole runs by the command line, minutes in all; their parts are tested in tests/run


def trained(place: Place) -> Path:
    """Train until the loss of `books`, of which the highest is wanted, is no better twice: it falls from step 2 on."""
    place.text("books/one.txt", words=300, seed=9)
    place.config(
        data={"validation": {"part": 0.3, "books": "text:books/*.txt"}},
        train={
            "steps": 20,
            "evaluate_every": 2,
            "checkpoint_every": 0,
            "keep_checkpoints": 1,
            "keep_best": {"highest": "books"},
            "early_stop": {"patience": 2, "monitor": {"highest": "books"}},
        },
    )
    said = place.good("train", "run.yaml", "--json").last()
    assert (said["outcome"], said["steps"], said["best_step"], said["best_of"]) == ("done", 6, 2, "books loss")
    assert list(said["validation"]) == ["part", "books"]
    (run,) = place.runs()
    return run


def test_the_best_is_found_by_name_and_a_run_that_ended_early_says_so(place: Place, inside: InThisProcess) -> None:
    run = trained(place)
    steps = list_checkpoints(run / "checkpoints")
    assert steps == (6, 2)
    latest, best = (
        inside.good(place, "sample", run, "the "),
        inside.good(place, "sample", run, "the ", "--checkpoint", "best"),
    )
    assert "the checkpoint of step 6; the best one is of step 2" in latest.err
    assert "this is the best checkpoint, of step 2" in best.err
    assert gossamer.load(run, checkpoint="best").step == 2 and gossamer.load(run).step == 6
    inside.good(place, "export", run, place.folder / "out", "--to", "hf", "--checkpoint", "2")
    with pytest.raises(BadInput, match=r"--checkpoint: wanted the step of a checkpoint that is there, got 4.*: 6, 2"):
        gossamer.load(run, checkpoint=4)

    again = place.good("resume", run)
    assert "nothing to do, it ended at step 6 (early stop: 2 evaluations without a better books loss" in again.out
    assert len(records(run, "start")) == 1

    on = place.good("resume", run, "train.early_stop.patience=3", "train.steps=8", "--json").last()
    assert (on["outcome"], on["steps"]) == ("done", 8)
    assert list_checkpoints(run / "checkpoints") == (8, 2), "the best one stays"

    back = place.good("resume", run, "train.early_stop.patience=9", "train.steps=4", "--checkpoint", "best")
    assert [one["step"] for one in records(run, "start")] == [0, 6, 2], back.out
    assert list_checkpoints(run / "checkpoints") == (4, 2)
    assert (run / "checkpoints" / "step-00000008.aside-0").is_dir(), "nothing is thrown away"
    assert "goes on from step 2, as asked" in back.out
    assert open_checkpoint(run / "checkpoints", 4).meta["watch"]["early_stop"]["waited"] == 1


def test_a_run_without_a_best_says_which_steps_there_are(place: Place, inside: InThisProcess) -> None:
    place.config(train={"steps": 2})
    place.good("train", "run.yaml")
    (run,) = place.runs()
    done = inside.run(place, "sample", run, "the ", "--checkpoint", "best")
    assert done.code == 2 and "wanted a run that keeps its best checkpoint (train.keep_best)" in done.err + done.out
    done = place.run("resume", run, "train.steps=4", "--checkpoint", "newest")
    assert done.code == 2 and "wanted latest, best or the step of a checkpoint, got 'newest'" in done.err + done.out


def test_the_text_of_a_validation_set_is_missed_by_its_name(place: Place) -> None:
    place.config(data={"validation": {"part": 0.3, "books": "text:nowhere/*.txt"}})
    done = place.run("train", "run.yaml")
    assert done.code == 2 and "data.validation.books" in done.err + done.out and "nowhere" in done.err + done.out
    assert place.runs() == []
