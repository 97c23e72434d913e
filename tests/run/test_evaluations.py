"""Several validation sets and metrics of one's own: the same figures in every layout, and errors with their place."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.run.early_stop import EarlyStop
from gossamer.run.metrics import load_metrics
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.unread_keys import check_given
from gossamer.spec.watched_figure import WatchedFigure
from run.test_keep_best import LAYOUTS
from run.test_trainer import records

METRIC = "run.measures:accuracy"


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_metrics_are_those_of_one_process(pool, tmp_path: Path, layout: str) -> None:
    """Two sets, evaluated before and after training. The accuracy counts labels, of which micro-batches differ."""
    ranks, more, kind = LAYOUTS[layout]
    sets = {"first": 20, "second": 13}
    given = {"train": {"metrics": [METRIC], "evaluate_every": 2, "optimizer": {"sgd": {"lr": 0.5}}}}
    pool.run("run.keep_jobs:train_on_sets", 1, folder=str(tmp_path / "one"), sets=sets, kind=kind, sections=given)
    many = {**given, **more}
    if layout == "islands":  # which are apart from the first step on: the losses are others, the figures exist
        pool.run("run.keep_jobs:train_on_sets", ranks, folder=str(tmp_path / "many"), sets=sets, sections=many)
        assert [one["name"] for one in records(tmp_path / "many", "evaluation")] == ["first", "second"] * 2
        return
    pool.run("run.keep_jobs:train_on_sets", ranks, folder=str(tmp_path / "many"), sets=sets, kind=kind, sections=many)
    one, other = (records(tmp_path / name, "evaluation") for name in ("one", "many"))
    assert [each["name"] for each in one] == [each["name"] for each in other] == ["first", "second"] * 2
    for figure in (lambda each: each["loss"], lambda each: each["metrics"]["accuracy"]):
        assert list(map(figure, other)) == pytest.approx(list(map(figure, one)), rel=1e-4)
    assert 0 < one[-1]["metrics"]["accuracy"] < 1 and one[0]["loss"] != one[1]["loss"]


def test_accuracy_is_the_count_over_all_labels(pool, tmp_path: Path) -> None:
    """Beside the formula: of a model whose logits are known, on all sequences at once."""
    from run.jobs import Tokens
    from run.measures import accuracy

    (found,) = pool.run(
        "run.keep_jobs:train_on_sets",
        1,
        folder=str(tmp_path),
        sets={"all": 64},
        kind="small",
        steps=1,
        sections={"train": {"metrics": [METRIC]}},
        logits=64,
    )
    data = Tokens(64)
    labels = torch.nn.functional.pad(data.labels[:, 1:], (0, 1), value=-100)
    right, count = accuracy(torch.tensor(found["logits"]), labels)
    assert records(tmp_path, "evaluation")[-1]["metrics"]["accuracy"] == pytest.approx(float(right) / float(count))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("run.measures:broken", r"the metric run\.measures:broken raised ZeroDivisionError at .*measures\.py:\d+"),
        ("run.measures:no_count", r"train\.metrics: wanted a sum and a count from run\.measures:no_count"),
    ],
)
def test_a_metric_that_fails_says_where_before_the_first_step(pool, tmp_path: Path, function: str, said: str) -> None:
    given = {"train": {"metrics": [function]}}
    (answer,) = pool.attempt(
        "run.keep_jobs:train_on_sets", 1, folder=str(tmp_path), sets={"a": 8}, kind="small", sections=given
    )
    assert re.search(said, answer["error"]), answer["error"]
    assert not (tmp_path / "run" / "records.jsonl").exists() or not records(tmp_path, "step")


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"run\.measures has no function 'acuracy': did you mean 'accuracy'"):
        load_metrics(["run.measures:acuracy"])
    with pytest.raises(BadInput, match=r"train\.metrics: wanted to import no_such_module"):
        load_metrics(["no_such_module:f"])


def test_the_place_of_a_metric_that_fails_is_in_the_error() -> None:
    (metric,) = load_metrics(["run.measures:broken"])
    with pytest.raises(RunFailed, match=r"ZeroDivisionError at .*measures\.py:\d+"):
        metric(torch.zeros(1, 2), torch.zeros(1))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"keep_best": "bocks"}, "data": {"validation": {"books": "text:x"}}}, r"write one of books"),
        ({"train": {"keep_best": True}, "data": {"validation": 0}}, r"train\.keep_best: wanted validation data"),
        ({"train": {"early_stop": {"patience": 2}, "evaluate_every": 0}}, r"wanted evaluations during the run"),
        ({"train": {"early_stop": {"min_delta": 0.1}}}, r"train\.early_stop\.min_delta: wanted .*patience above 0"),
        ({"train": {"metrics": ["a:f", "b:f"]}}, r"train\.metrics: wanted functions of different names"),
        ({"train": {"metrics": ["accuracy"]}}, r'train\.metrics: wanted "package\.module:function"'),
        ({"train": {"metrics": ["a:f"]}, "data": {"validation": 0}}, r"train\.metrics: wanted validation data"),
    ],
)
def test_what_no_evaluation_has_is_refused_without_a_model(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_given(RunConfig.model_validate(sections))


def stop(**more: Any) -> EarlyStop:
    return EarlyStop(figure=WatchedFigure(of="v"), data="8 sequences", patience=2, **{"min_delta": 0.0, **more})


def test_early_stop_counts_evaluations_in_a_row() -> None:
    one = stop(min_delta=0.1)
    waited = []
    for step, loss in enumerate([3.0, 2.95, 2.8, math.nan, 2.75]):
        one.see(step, {("v", "loss"): loss})
        waited.append(one.waited)
    assert waited == [0, 1, 0, 1, 2] and one.is_over
    assert one.reason == "early stop: 2 evaluations without a better v loss than 2.8 of step 2 by more than 0.1"


def test_the_state_of_other_data_counts_for_nothing() -> None:
    one, other = stop(), stop()
    for step in range(3):
        one.see(step, {("v", "loss"): 1.0})
    other.restore(one.meta())
    assert other.is_over and other.best == one.best
    another = EarlyStop(figure=WatchedFigure(of="v"), data="9 sequences", patience=2, min_delta=0.0)
    another.restore(one.meta())
    assert another.waited == 0 and not another.best.is_there
