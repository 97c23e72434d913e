"""The parts of benchmarks/claims that need no measurement: grid, score, journal, rows and their record."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "claims"


def load(name: str) -> ModuleType:
    """By its file: a package called claims is here, too."""
    spec = importlib.util.spec_from_file_location(f"claims_harness_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


grid, score, trials, record, rows = map(load, ("_grid", "_score", "_trials", "_record", "__init__"))


def bowl(least: float) -> Any:
    """A loss with its minimum at `least`, in the logarithm."""
    return lambda point: math.log2(point / least) ** 2


def test_grid_extends_until_the_best_of_both_lies_inside() -> None:
    found = grid.tuned({"near": bowl(1.0), "far": bowl(5.0)}, {"near": 1.0, "far": 1.0}, factor=2.0, least=3, most=6)
    assert sorted(found["far"].tried) == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert found["far"].best == 4.0 and found["far"].is_bracketed
    assert len(found["near"].tried) == len(found["far"].tried), "both sides get the same number of trials"
    assert found["near"].best == 1.0 and found["near"].is_bracketed


def test_grid_goes_down_and_says_where_the_best_is_at_the_border() -> None:
    found = grid.tuned({"low": bowl(0.01)}, {"low": 1.0}, factor=2.0, least=3, most=4)["low"]
    assert sorted(found.tried) == [0.25, 0.5, 1.0, 2.0]
    assert found.best == 0.25 and not found.is_bracketed and found.told()["at_border"] is True


def test_grid_takes_a_run_that_diverged_for_the_worst() -> None:
    found = grid.tuned({"one": lambda p: math.nan if p > 1 else bowl(0.9)(p)}, {"one": 1.0}, most=5)["one"]
    assert found.best == 1.0 and found.is_bracketed


def test_grid_refines_between_the_best_and_its_better_neighbor() -> None:
    one = grid.Tuned({1.0: 3.0, 2.0: 1.0, 4.0: 2.0})
    assert one.following(2.0) == pytest.approx(math.sqrt(8))


def test_score_is_that_of_the_worked_example() -> None:
    found = score.scores({"a": [1, 2, math.inf], "b": [2, 1, 1], "c": [4, 3, 9]})
    assert {name: round(one, 3) for name, one in found.items()} == {"a": 0.556, "b": 0.889, "c": 0.111}


def test_score_is_the_area_under_the_performance_profile() -> None:
    times = {"a": [1.0, 2.5, 7.0, math.inf], "b": [1.3, 1.0, 2.0, 5.0], "c": [3.9, math.inf, 1.9, 5.5]}
    best = [min(each) for each in zip(*times.values(), strict=True)]
    count = 30_000
    for name, found in score.scores(times).items():
        ratios = [time / least for time, least in zip(times[name], best, strict=True)]
        taus = (1 + 3 * (k + 0.5) / count for k in range(count))
        area = sum(sum(r <= tau for r in ratios) / len(ratios) for tau in taus) / count
        assert found == pytest.approx(area, abs=1e-4)


def test_score_of_a_workload_that_nobody_solves_is_nothing() -> None:
    assert score.scores({"a": [1.0, math.inf], "b": [2.0, math.inf]}) == {"a": 0.5, "b": pytest.approx(1 / 3)}


def test_time_to_target_is_that_of_the_first_evaluation_there() -> None:
    seen = [(1.0, 5.0), (2.0, 3.0), (3.0, 3.2), (4.0, 2.0)]
    assert score.time_to(3.1, seen) == 2.0
    assert score.time_to(1.9, seen) == math.inf
    assert score.geometric_speedup([1.0, 4.0], [2.0, 2.0]) == pytest.approx(1.0)
    assert score.geometric_speedup([math.inf, 4.0], [2.0, 2.0]) == 0.0


def test_quasi_random_numbers_are_those_of_van_der_corput() -> None:
    assert [score.drawn(i, 2) for i in range(4)] == [0.5, 0.25, 0.75, 0.125]
    assert [score.drawn(i, 3) for i in range(3)] == pytest.approx([1 / 3, 2 / 3, 1 / 9])


class Held(dict[str, Any]):
    def put(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


def test_journal_measures_a_trial_once_and_names_its_commit() -> None:
    shelves: dict[str, Held] = {}
    calls: list[int] = []

    def of(study: str) -> Held:
        return shelves.setdefault(study, Held())

    def measure() -> int:
        calls.append(1)
        return len(calls)

    first = trials.Trials(of, "paper.study", commit="aaa", until=math.inf, tell=lambda text: None)
    assert [first("lr 1", measure), first("lr 1", measure), first("lr 2", measure)] == [1, 1, 2]
    again = trials.Trials(of, "paper.study", commit="bbb", until=math.inf, tell=lambda text: None)
    assert again("lr 2", measure) == 2 and again.commits == {"aaa"}
    assert again("lr 3", measure) == 3 and again.commits == {"aaa", "bbb"}
    other = trials.Trials(of, "paper.other", commit="bbb", until=math.inf, tell=lambda text: None)
    assert other("lr 1", measure) == 4
    assert other.of("study")("lr 1", measure) == 1 and other.commits == {"aaa", "bbb"}


def test_journal_begins_no_trial_after_the_deadline_but_gives_what_it_has() -> None:
    clock = itertools.count().__next__
    one = trials.Trials(lambda study: Held(), "p.s", commit="a", until=3, clock=clock, tell=lambda text: None)
    assert one("first", lambda: 7) == 7  # asks the clock at 0, 1 and 2
    with pytest.raises(trials.OutOfTime, match=r"p\.s/second"):
        one("second", lambda: 8)
    assert one("first", lambda: 9) == 7


def some_row(**given: Any) -> dict[str, Any]:
    made = rows.Row(method="m", claim="c", baseline="b", ratio=1.0, paper_ratio=2.0, setting="s", holds=False)
    return {"paper": "p", "study": "s", "commit": "old", **asdict(made), **given}


def test_a_row_has_the_fields_of_the_record() -> None:
    assert tuple(one.name for one in fields(rows.Row))[:-1] == record.FIELDS + record.OPTIONAL


def test_record_keeps_rows_of_studies_that_did_not_run_and_names_those_without() -> None:
    studies = ["a.x", "a.y", "b.z", "b.w"]
    before = {
        "rows": [
            some_row(paper="b", study="z"),
            some_row(paper="a", study="x"),
            some_row(paper="gone", study="x"),
        ],
        "left_out": {"b.w": "needs root"},
    }
    found = record.merged(before, studies, {"a.x": [some_row(paper="a", study="x", commit="new")]}, {"a.y": "late"})
    assert [(r["paper"], r["study"], r["commit"]) for r in found["rows"]] == [("a", "x", "new"), ("b", "z", "old")]
    assert found["left_out"] == {"a.y": "late", "b.w": "needs root"}
    late = record.merged(before, studies, {}, {"a.x": "late"})
    assert [r["paper"] for r in late["rows"]] == ["a", "b"]
    assert late["left_out"]["a.x"] == "late; earlier rows stay"
    assert record.merged(late, studies, {}, {})["left_out"]["a.x"] == "late; earlier rows stay"
    ran = record.merged(late, studies, {"a.x": [some_row(paper="a", study="x")]}, {})
    assert "a.x" not in ran["left_out"]


def test_studies_are_chosen_by_paper_and_by_pattern() -> None:
    studies = ["muon.loss", "muon.time", "star.hosts_4"]
    assert record.chosen(studies, [], []) == studies
    assert record.chosen(studies, ["muon"], []) == ["muon.loss", "muon.time"]
    assert record.chosen(studies, [], ["*.hosts_*", "muon.time"]) == ["muon.time", "star.hosts_4"]
    assert record.chosen(studies, ["star"], ["muon.*"]) == []


def test_every_row_of_the_record_is_whole_and_of_a_study_that_exists() -> None:
    kept = json.loads((ROOT / "docs" / "results" / "claims.json").read_text("utf-8"))
    words = [sys.executable, str(ROOT / "benchmarks" / "claims.py"), "--list"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    for row in kept["rows"]:
        assert set(record.FIELDS) | {"paper", "study", "commit", "details"} == set(row) - set(record.OPTIONAL), row[
            "claim"
        ]
        assert f"{row['paper']}.{row['study']}" in listed
    assert set(kept["left_out"]) <= set(listed)


_ISLANDS = """
from claims._lm import Islands, Run, Shape, trained
shape = Shape(width=16, layers=1, heads=2, context=16)
sgd = {"sgd": {"lr": 0.5}}
dense, apart, parted = (
    trained(Run(shape=shape, optimizer=sgd, steps=6, tokens=256, islands=islands, clip=1e9))["loss"]
    for islands in (None, Islands(count=4, sync_every=1), Islands(count=4, sync_every=3))
)
print(dense, apart, parted)
"""


def test_islands_that_average_after_every_sgd_step_are_one_process() -> None:
    """The mean of the islands' steps is the step of the mean gradient; with three steps between it is not."""
    words = [sys.executable, "-c", _ISLANDS]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT / "benchmarks")
    dense, apart, parted = map(float, done.stdout.split())
    assert dense < 5.6, "it learns"
    assert apart == pytest.approx(dense, abs=2e-6)
    assert abs(parted - dense) > 1e-5
