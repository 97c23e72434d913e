"""Recommendations from a sweep's folder that is written here: no run is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer.api.sweep.command import Sweep
from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.recommend import recommend_command
from gossamer.api.sweep.trial import TrialResult
from gossamer.cli import main
from gossamer.spec.errors import BadInput

LR, SGD, BATCH = "train.optimizer.adamw.lr", "train.optimizer.sgd.lr", "train.batch"


def swept(folder: Path, settings: list[str], figure: str = "validation_loss", left: int = 0) -> Path:
    """A sweep whose score is 2 + log10(lr) / 10 + batch / 100; its last `left` points are open."""
    file = folder.parent / "run.yaml"
    file.write_text("train: {steps: 100}\n")
    sweep, place = Sweep.of(file, settings, seeds=1, halving=False), SweepFolder(folder)
    place.open(sweep.asked(), file)
    for one in sweep.trials(range(len(sweep.points) - left), 1.0):
        values = dict(text.split("=") for text in one.overrides)
        exponent = int((values[LR] if LR in values else values[SGD]).partition("e")[2])
        score = 2 + exponent / 10 + int(values.get(BATCH, 8)) / 100
        place.append(TrialResult(trial=one.name, outcome="done", figures={figure: score}))
    return folder


def test_what_was_not_tried_is_ranked_by_its_predicted_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = swept(tmp_path / "s", [f"{BATCH}=8,16,32", f"{LR}=1e-1,1e-2,1e-3,1e-4"], left=2)
    told = recommend_command([folder])
    assert [one["overrides"] for one in told["points"]] == [[f"{BATCH}=32", f"{LR}=1e-{n}"] for n in (4, 3)]
    assert told["points"][0]["predicted"] == pytest.approx(1.92, abs=0.03)
    assert told["rows"] == 10 and told["error"] < told["error_of_mean"] / 3
    assert told["features"] == [BATCH, LR]
    assert main(["recommend", str(folder), f"{LR}=1e-5,1e-6", "--top", "1", "--json"]) == 0
    (best,) = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert best["overrides"] == [f"{LR}=1e-6"]


def test_what_sweeps_cannot_tell_is_refused(tmp_path: Path) -> None:
    folder = swept(tmp_path / "s", [f"{BATCH}=8,16,32", f"{LR}=1e-2,1e-3"])
    few = swept(tmp_path / "few", [f"{LR}=1e-2,1e-3"])
    other = swept(tmp_path / "other", [f"{LR}=1e-2,1e-3"], figure="final_loss")
    for folders, settings, said in (
        ([tmp_path / "none"], [], "the folder of a sweep with runs that are done"),
        ([few], [], "6 or more combinations that are done, got 2"),
        ([folder, other], [], "validation_loss and final_loss"),
        ([folder], [], "a combination that was not tried, got 6"),
        ([folder], ["data.sequence=32,64"], "tell something about"),
        ([folder], [f"{BATCH}=64", "train.optimizer={sgd: {lr: 0.1}}"], rf"no value.*write {LR}"),
    ):
        with pytest.raises(BadInput, match=said):
            recommend_command(folders, settings)


def test_what_no_run_tells_of_another_task_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, task = swept(tmp_path / "s", [f"{BATCH}=8,16,32", f"{LR}=1e-2,1e-3"]), tmp_path / "task.yaml"
    assert recommend_command([folder], [f"{BATCH}=64"])["untold"] == []
    task.write_text("train: {steps: 100, max_grad_norm: 0.5}\ndata: {sequence: 32}\n")
    assert main(["recommend", str(folder), "--for", str(task)]) == 0
    assert "no prediction counts it: data.sequence, train.max_grad_norm" in capsys.readouterr().out


def test_the_rates_of_two_optimizers_are_not_crossed(tmp_path: Path) -> None:
    """A run has one of them: the combinations are those with either rate."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    adamw = swept(tmp_path / "a/s", [f"{BATCH}=8,16,32", f"{LR}=1e-2,1e-3"], left=1)
    sgd = swept(tmp_path / "b/s", [f"{BATCH}=8,16,32", f"{SGD}=1e-1,1e-2"], left=1)
    told = recommend_command([adamw, sgd])
    found = [one["overrides"] for one in told["points"]]
    assert sorted(found) == [[f"{BATCH}=32", f"{LR}=1e-3"], [f"{BATCH}=32", f"{SGD}=1e-2"]]
    assert told["open"] == 2
