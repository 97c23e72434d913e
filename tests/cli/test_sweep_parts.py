"""A sweep's ranking and journal, without runs, and what is refused before any starts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gossamer.api.sweep.command import Sweep, first_line
from gossamer.api.sweep.journal import SweepFolder
from gossamer.api.sweep.ranking import ranked, survivors
from gossamer.api.sweep.trial import Trial, TrialResult, common_metric
from gossamer.cli import main
from gossamer.cli.output import table
from gossamer.spec.errors import BadInput
from gossamer.view.screen import Screen


def trial(point: int, seed: int = 0, steps: int = 8) -> Trial:
    return Trial(point, (f"train.batch={point + 1}",), seed, steps)


def done(one: Trial, loss: float, **more: float) -> TrialResult:
    return TrialResult(trial=one.name, outcome="done", directory=one.name, figures={"validation_loss": loss, **more})


def failed(one: Trial) -> TrialResult:
    return TrialResult(trial=one.name, outcome="failed", error="it broke")


def by_name(*results: TrialResult) -> dict[str, TrialResult]:
    return {one.trial: one for one in results}


def test_points_are_ranked_by_their_mean_and_incomplete_ones_follow() -> None:
    trials = [trial(point, seed) for point in range(4) for seed in range(2)]
    losses = {0: (3.0, 5.0), 1: (2.0, 3.0), 2: (1.0, None), 3: (None, None)}
    results = by_name(
        *(failed(one) if (loss := losses[one.point][one.seed]) is None else done(one, loss) for one in trials)
    )
    scores = ranked(trials, results, "validation_loss")
    assert [score.point for score in scores] == [1, 0, 2, 3]
    assert (scores[0].mean, scores[0].spread) == (2.5, pytest.approx(math.sqrt(0.5)))
    assert scores[0].best_directory == trial(1, 0).name
    assert (scores[2].values, scores[2].seeds, scores[3].mean) == ((1.0,), 2, None)


def test_points_with_more_steps_come_first_and_count_with_those() -> None:
    trials = [trial(0, steps=4), trial(1, steps=4), trial(1, steps=8)]
    results = by_name(*(done(one, loss) for one, loss in zip(trials, (2.0, 2.5, 2.4), strict=True)))
    assert [(score.point, score.mean) for score in ranked(trials, results, "validation_loss")] == [(1, 2.4), (0, 2.0)]


def test_the_better_half_goes_on_and_what_failed_does_not() -> None:
    trials = [trial(point) for point in range(5)]
    results = by_name(*(done(one, 5.0 - one.point) for one in trials))
    assert survivors(trials, results) == [2, 3, 4]
    assert survivors(trials, results | by_name(*map(failed, trials[1:]))) == [0]


def test_the_metric_is_the_best_that_all_have() -> None:
    one, other = done(trial(0), 2.0, validation_bits_per_byte=1.0), done(trial(1), 3.0)
    assert common_metric([one]) == "validation_bits_per_byte"
    assert common_metric([one, other]) == "validation_loss"
    assert common_metric([failed(trial(0))]) is None


def test_a_loss_that_is_no_number_is_a_failure() -> None:
    summary: dict[str, Any] = {"directory": "d", "final_loss": None, "validation_loss": 2.0, "validation_step": 8}
    assert "diverged" in TrialResult.of_summary(trial(0), summary).error
    assert TrialResult.of_summary(trial(0), {**summary, "final_loss": 2.0}).is_done


def test_a_journal_survives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.append(failed(trial(0)))
    folder.append(done(trial(0), 2.0))
    with folder.journal_file.open("a") as file:
        file.write('{"trial": "001')
    folder.append(done(trial(2), 3.0))
    assert folder.results() == by_name(done(trial(0), 2.0), done(trial(2), 3.0))


def test_the_cause_of_a_failed_run_is_found_on_its_page() -> None:
    page = "+- the run failed -+\n| first failing rank  0 |\n| likely cause        MemoryError: none |\n+---+"
    assert first_line(page) == "MemoryError: none"
    assert first_line("train.batch: wanted more\nand so on") == "train.batch: wanted more"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("train: {steps: 100}\n")
    return Path("run.yaml")


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (["train.optimizr.adamw.lr=1,2"], {}, "did you mean 'optimizer'"),
        (["train.optimizer.adamw.lrr=1,2"], {}, "lrr"),
        (["train.optimizer.adamw.lr=1e-3,fast"], {}, "wanted a number, got 'fast'"),
        (["train.optimizer=adamw,admw"], {}, "did you mean"),
        (["train.batch=8"], {}, "got one run"),
        (["train.seed=1,2"], {}, "--seeds"),
        (["run.name=a,b"], {}, "run.name"),
        (["train.batch=1,8", "machines.processes=2"], {}, "a batch of 1 for 2 processes"),
        (["train.steps=5,6"], {"halving": True}, "--halving"),
    ],
)
def test_a_sweep_is_refused_before_it_starts(
    file: Path, settings: list[str], options: dict[str, bool], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        Sweep.of(file, settings, seeds=1, **{"halving": False, **options})
    assert [path.name for path in Path().iterdir()] == ["run.yaml"]


def test_halving_doubles_the_steps_from_rung_to_rung(file: Path) -> None:
    sweep = Sweep.of(file, ["train.batch=1,2,4,8", "data.sequence=32,64"], seeds=2, halving=True)
    assert [len({one.point for one in sweep.trials(range(8), part)}) for part in sweep.rungs] == [8] * 4
    assert [sweep.trials([0], part)[0].steps for part in sweep.rungs] == [12, 25, 50, 100]


def test_another_sweep_in_the_same_folder_is_refused(file: Path, tmp_path: Path) -> None:
    one, other = (Sweep.of(file, [f"train.batch=8,{size}"], seeds=1, halving=False) for size in (16, 32))
    folder = SweepFolder(tmp_path / "s")
    folder.open(one.asked(), file)
    folder.open(one.asked(), file)
    with pytest.raises(BadInput, match="holds another sweep"):
        folder.open(other.asked(), file)
    assert one.folder() != other.folder()


def test_the_command_says_what_is_wrong_in_one_block(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "run.yaml", "train.bach=1,2", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "did you mean 'batch'" in err and json.loads(out.splitlines()[-1])["exit"] == 2
    assert main(["sweep", "run.yaml", "train.batch=8,16", "--seeds", "0"]) == 2


def test_stages_share_a_batch_that_replicas_could_not(file: Path) -> None:
    """Four ranks in four stages are one replica: a batch of two is enough, as `gossamer train` finds."""
    shape = ("machines.processes=4", "plan.mesh.pipe=4", "train.batch=2", "train.seed=1")
    assert len(Sweep.of(file, [*shape, "train.optimizer.adamw.lr=1e-4,1e-3"], seeds=1, halving=False).points) == 2
    with pytest.raises(BadInput, match="at least one sequence per process and step, got a batch"):
        Sweep.of(file, ["machines.processes=4", "train.batch=2,8"], seeds=1, halving=False)


def test_a_table_that_is_too_wide_has_a_line_for_each_cell() -> None:
    rows = [("text", "loss (nats/token)", "bytes"), ("a.txt", "1.250000", "1,024"), ("all", "1.5", "2")]
    assert table(rows, screen=Screen(80)) == table(rows) == table(rows, screen=Screen(None))
    narrow = table(rows, screen=Screen(24))
    assert narrow.splitlines() == [
        "  a.txt",
        "    loss (nats/token):",
        "      1.250000",
        "    bytes: 1,024",
        "  all",
        "    loss (nats/token):",
        "      1.5",
        "    bytes: 2",
    ]
