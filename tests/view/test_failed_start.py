"""A start that failed takes away what it has made, and nothing that is the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, PeerLost
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_lock import held
from view.streams import start


def failing(directory: RunDirectory, *written: str, error: Exception | None = None) -> None:
    """A start that writes its settings and these files, and fails."""
    with pytest.raises((BadInput, PeerLost)), held(directory.path), rollback_failed_start(directory):
        directory.keep(RunConfig(), {})
        for name in written:
            file = directory.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("made")
        directory.checkpoints.mkdir()
        raise error or BadInput("no such text")


MADE = ("plan.yaml", "logs/rank-00000.log", "errors/rank-00000.json", "tokenizer/x", "tensorboard/events")


def files(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*") if one.is_file()}


def test_a_folder_that_holds_nothing_else_is_gone(tmp_path: Path) -> None:
    failing(RunDirectory(tmp_path / "runs" / "exp1"), *MADE)
    assert [*(tmp_path / "runs").iterdir()] == []


@pytest.mark.parametrize("mine", ["out.log", "config.yaml", "logs/of-slurm.log", "model/weights", "plan.yaml"])
def test_what_the_user_had_there_stays_as_it_was(tmp_path: Path, mine: str) -> None:
    directory = RunDirectory(tmp_path / "exp1")
    file = directory.path / mine
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    failing(directory, *(name for name in MADE if Path(name).parts[0] != "logs"))
    assert files(directory.path) == {mine: "mine"}


def test_what_comes_meanwhile_stays_too(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "exp1")
    failing(directory, *MADE, "notes.txt", "other/results.json")
    assert files(directory.path) == {"notes.txt": "made", "other/results.json": "made"}


def test_a_run_keeps_its_settings_and_what_it_has_saved(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "exp1")
    directory.keep(RunConfig.model_validate({"train": {"steps": 7}}), {})
    directory.append(start())
    before = files(directory.path)
    failing(directory, "plan.yaml")
    assert files(directory.path) == before


def test_after_another_failure_logs_stay(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "exp1")
    failing(directory, *MADE, error=PeerLost("rank 1 is gone"))
    assert {"run.yaml", "logs/rank-00000.log"} <= files(directory.path).keys()
