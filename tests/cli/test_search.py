"""A sweep whose points a sampler chooses: ranges, what is refused, and on what the choice depends: its folder alone."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.search import SAMPLERS, Point, Range, Search
from gossamer.api.sweep.trial import TrialResult
from gossamer.cli import main
from gossamer.spec.errors import BadInput

LR = "train.optimizer.adamw.lr=1e-5..1e-2:log"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("train: {steps: 100}\n")
    return Path("run.yaml")


def test_a_range_is_read_with_its_scale_and_kind() -> None:
    found = Range.parse(LR)
    assert found == Range(key="train.optimizer.adamw.lr", low=1e-5, high=1e-2, is_log=True, is_whole=False)
    assert Range.parse("train.batch=8..32") == Range(key="train.batch", low=8, high=32, is_log=False, is_whole=True)
    assert found.readable(0.00031622776) == 0.0003162 and found.readable(0.0099999) == 1e-2
    for other in ("train.batch=8,16", "run.name=../a", "train.batch=8", "data.source=text:../*.txt", "a=1..2..3"):
        assert Range.parse(other) is None, other


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ([LR], {"sampler": "tpee"}, "did you mean 'tpe'"),
        (["train.optimizer.adamw.lr=1e-2..1e-5"], {}, "the lower one first"),
        (["train.optimizer.adamw.lr=0..1:log"], {}, "numbers above 0"),
        (["train.optimizr.adamw.lr=1..2"], {}, "did you mean 'optimizer'"),
        (["train.batch=0..8"], {}, "train.batch"),
        (["train.batch=8"], {}, "a key with a range or several values"),
        (["train.steps=5..9"], {}, "one train.steps"),
        (["train.seed=1..9"], {}, "--seeds"),
        (["run.name=a,b"], {}, "run.name"),
        ([LR, "train.optimizer.adamw.lr=1e-3,1e-2"], {}, "every key once"),
        ([LR, "train.optimizer=adamw,admw"], {}, "did you mean|another way|optimizer"),
    ],
)
def test_a_search_is_refused_before_it_starts(
    file: Path, settings: list[str], options: dict[str, str], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        Search.of(file, settings, seeds=1, **{"sampler": "tpe", **options})
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([LR], "or --sampler, got a range"),
        (["train.batch=8,16", "--points", "3"], "--points with --sampler"),
        ([LR, "--sampler", "tpe", "--halving"], "--halving or --sampler"),
        ([LR, "--sampler", "tpe", "--points", "0"], "a number >= 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    file: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "run.yaml", *words, "--json"]) == 2
    assert said in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_a_missing_package_is_named_with_its_extra(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", "run.yaml", LR, "--sampler", "tpe"]) == 2
    assert "--sampler needs the package optuna" in capsys.readouterr().err


def test_the_points_that_were_chosen_survive_a_crash(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    assert folder.points() == []
    folder.keep_points([{"train.batch": 8, "train.optimizer.adamw.lr": 1e-3}, {"train.batch": 16}])
    assert folder.points() == [{"train.batch": 8, "train.optimizer.adamw.lr": 1e-3}, {"train.batch": 16}]
    folder.points_file.write_text('{"train.batch": 8}\n{"train.ba')
    assert folder.points() == [{"train.batch": 8}]


def bowl(search: Search, points: list[Point]) -> dict[str, TrialResult]:
    """Return results whose best point has lr 1e-3 and batch 16; of large lr they diverge."""
    found = {}
    for number, point in enumerate(points):
        for trial in search.trials(number, point):
            lr, batch = float(point["train.optimizer.adamw.lr"]), point["train.batch"]
            loss = abs(math.log10(lr) + 3) + (0.0 if batch == "16" else 0.5)
            figures = {"validation_loss": loss}
            outcome = "done" if lr < 9e-3 else "failed"
            found[trial.name] = TrialResult(trial=trial.name, outcome=outcome, figures=figures)
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_chosen_depends_on_the_points_before_alone(file: Path, sampler: str) -> None:
    optuna = pytest.importorskip("optuna")
    if sampler == "gp":
        pytest.importorskip("scipy")
    search = Search.of(file, [LR, "train.batch=8,16"], sampler=sampler, seeds=2)

    def chosen(before: list[Point], count: int) -> list[Point]:
        points = list(before)
        while len(points) < count:
            points.append(search.choose(optuna, points, bowl(search, points)))
        return points

    whole = chosen([], 14)
    assert chosen(whole[:9], 14) == whole  # as a search that was stopped after 9 points and goes on
    assert len({json.dumps(one) for one in whole}) > 10
    assert all(1e-5 <= one["train.optimizer.adamw.lr"] <= 1e-2 and one["train.batch"] in ("8", "16") for one in whole)


def test_a_sampler_learns_from_the_results(file: Path) -> None:
    optuna = pytest.importorskip("optuna")
    search = Search.of(file, [LR, "train.batch=8,16"], sampler="tpe", seeds=1)
    points: list[Point] = []
    for _ in range(30):
        points.append(search.choose(optuna, points, bowl(search, points)))
    late = [one for one in points[15:] if one["train.batch"] == "16" and 1e-4 < one["train.optimizer.adamw.lr"] < 9e-3]
    assert len(late) >= 10, points[15:]  # of 15; by chance 5


def test_a_point_that_runs_is_not_taken_for_one_that_failed(file: Path) -> None:
    optuna = pytest.importorskip("optuna")
    search = Search.of(file, ["train.batch=1..64"], sampler="tpe", seeds=2)
    first = search.choose(optuna, [], {})
    second = search.choose(optuna, [first], {})
    assert first.keys() == second.keys() == {"train.batch"} and isinstance(first["train.batch"], int)
