"""Callbacks of `gossamer.train`, and its result with the records as arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer.job.user_callbacks import UserCallbacks
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.records import Record
from run.test_caution import Net
from run.test_keep_best import LAYOUTS
from run.test_trainer import records


def train(folder: Path, callbacks: list[Any], **train: Any) -> gossamer.api.verbs.TrainingResult:
    text = folder / "a.txt"
    text.write_text("some words, many times over. " * 60)
    config = {
        "train": {"steps": 6, "batch": 2, "evaluate_sequences": 4, "evaluate_every": 2, "checkpoint_every": 3, **train},
        "data": {"sequence": 16, "cache": str(folder / "cache"), "validation": {"part": 0.1, "all": f"text:{text}"}},
        "run": {"directory": str(folder / "runs"), "display": "quiet"},
    }
    torch.manual_seed(0)
    return gossamer.train(Net(), f"text:{text}", config, callbacks=callbacks)


class Seen:
    """Keeps what it is told; draws random numbers and spoils the record, none of which the run may notice."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def on_step(self, record: Record) -> None:
        torch.manual_seed(7)
        record.wire_bytes["mine"] = 1
        self.said.append(("step", record.step))

    def on_evaluation(self, record: Record) -> None:
        self.said.append((record.name, record.step))

    def on_save(self, record: Record) -> None:
        self.said.append(("save", record.step))

    def on_end(self, record: Record) -> None:
        self.said.append((record.outcome, record.step))


def test_callbacks_are_told_and_change_nothing(tmp_path: Path) -> None:
    seen, kinds = Seen(), []
    (tmp_path / "plain").mkdir(), (tmp_path / "told").mkdir()
    plain = train(tmp_path / "plain", [])
    told = train(tmp_path / "told", [seen, lambda record: kinds.append(record.kind)])
    assert [one for one in seen.said if one[0] == "step"] == [("step", n) for n in range(1, 7)]
    assert [one for one in seen.said if one[0] in ("part", "all")] == [
        (s, n) for n in (2, 4, 6) for s in ("part", "all")
    ]
    assert sorted(one for one in seen.said if one[0] == "save") == [("save", 3), ("save", 6)]
    assert seen.said[-1] == ("done", 6) and kinds.count("step") == 6 and kinds[-1] == "end"
    assert told.losses.tolist() == plain.losses.tolist()
    assert "mine" not in (Path(told["directory"]) / "records.jsonl").read_text()


def test_the_result_is_a_mapping_with_arrays(tmp_path: Path) -> None:
    result = train(tmp_path, [], evaluate_every=3)
    assert json.loads(json.dumps(result)) == dict(result) and result["outcome"] == "done"
    assert result.steps.tolist() == [1, 2, 3, 4, 5, 6] and result.losses.shape == (6,)
    assert result.losses[-1] == result["final_loss"]
    assert list(result.evaluations) == ["part", "all"]
    curve = result.evaluations["all"]
    assert curve.steps.tolist() == [3, 6] and curve.losses[-1] == result["validation"]["all"]["loss"]
    assert (curve.bits_per_byte > 0).all() and curve.metrics == {}


def test_a_callback_ends_the_run_as_done(tmp_path: Path) -> None:
    result = train(tmp_path, [lambda record: "stop" if record.kind == "step" and record.step == 3 else None])
    assert (result["outcome"], result["steps"], result["message"]) == (
        "done",
        4,
        "a callback ended the run after step 4",
    )
    assert result["checkpoint_step"] == 4


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_a_callback_ends_the_run_on_all_ranks(pool, tmp_path: Path, layout: str) -> None:
    ranks, more, kind = LAYOUTS[layout]
    ended = pool.run(
        "run.jobs:train", ranks, folder=str(tmp_path), steps=20, until=3, finish=True, kind=kind, sections=more
    )
    assert [one["ended"] for one in ended] == [""] * ranks
    (end,) = records(tmp_path, "end")
    assert (end["outcome"], end["reason"]) == ("done", "callback") and 3 <= end["step"] < 20


def test_an_error_of_a_callback_is_told_with_its_place(tmp_path: Path) -> None:
    def faulty(record: Record) -> None:
        raise KeyError("accuracy")

    with pytest.raises(
        RunFailed, match=r"callbacks\[0\] raised KeyError at .*test_callbacks\.py:\d+.* after step 1"
    ) as told:
        train(tmp_path, [faulty])
    assert isinstance(told.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Seen, "the class Seen: give an instance"),
        (3, "got an object of type int"),
        (object(), "wanted a function of a record"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_run(given: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        UserCallbacks([given])


def test_an_answer_of_another_kind_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="returned False from on_step: wanted None"):
        train(tmp_path, [lambda record: False])
