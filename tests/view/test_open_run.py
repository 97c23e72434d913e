"""How a run is named: by its folder, by a part of its name, or as the latest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.view.run_directory import RunDirectory, names_run, newest_like, open_run
from view.streams import start


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with runs/, whose second run was written to last."""
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(["20261101-lora-small", "20261102-Lora-large", "20261103-full"]):
        run = RunDirectory(Path("runs") / name)
        run.append(start())
        os.utime(run.records_file, (100 + at % 2, 100 + at % 2))
    return Path("runs")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("runs/20261103-full", "20261103-full"),
        ("20261103-full", "20261103-full"),
        ("full", "20261103-full"),
        ("LORA-S", "20261101-lora-small"),
        ("latest", "20261102-Lora-large"),
        ("runs/latest", "20261102-Lora-large"),
        ("runs/1103", "20261103-full"),
    ],
)
def test_a_run_is_found_by_what_names_it(runs: Path, said: str, name: str) -> None:
    assert open_run(Path(said)).path == runs / name


def test_a_name_that_is_a_part_of_another_is_itself(runs: Path) -> None:
    RunDirectory(runs / "full").append(start())
    assert open_run(Path("full")).path == runs / "full"


def test_a_run_that_is_just_being_removed_is_passed_over(runs: Path) -> None:
    config = RunConfig()
    for name in ("20261104-gone", "20261103-full"):
        RunDirectory(runs / name).keep(config, {})
    (runs / "20261104-gone" / "run.yaml").unlink()
    (runs / "20261104-gone" / "run.yaml").symlink_to("nowhere")
    (runs / "loop").symlink_to("loop")
    found = newest_like(runs, config)
    assert found is not None and found.path == runs / "20261103-full"
    assert open_run(Path("latest")).path == runs / "20261103-full"


def test_several_are_refused_with_their_names(runs: Path) -> None:
    with pytest.raises(
        BadInput, match=r"wanted one run for 'lora', got 2: 20261102-Lora-large, 20261101-lora-small: wr"
    ):
        open_run(Path("lora"))


def test_none_is_refused_with_the_nearest(runs: Path) -> None:
    with pytest.raises(
        BadInput, match=r"no such folder, and runs has no run of that name \(did you mean '20261103-ful"
    ):
        open_run(Path("20261103-fool"))
    with pytest.raises(BadInput, match="no such folder: name the folder"):
        open_run(Path("elsewhere/full"))


def test_a_folder_that_is_no_run_gives_way_to_a_run(runs: Path) -> None:
    Path("full").mkdir()
    assert open_run(Path("full")).path == runs / "20261103-full"
    Path("other").mkdir()
    with pytest.raises(BadInput, match=r"a folder without records\.jsonl"):
        open_run(Path("other"))
    (runs / "20261103-notes").mkdir()  # no run
    assert open_run(Path("20261103")).path == runs / "20261103-full"


@pytest.mark.parametrize(
    ("said", "is_one"), [("latest", True), ("full", True), ("lora", True), ("other", False), ("runs", False)]
)
def test_a_name_is_a_runs_where_one_or_several_have_it(runs: Path, said: str, is_one: bool) -> None:
    assert names_run(Path(said)) is is_one
