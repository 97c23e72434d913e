"""`gossamer watch` and `gossamer train --on ray` as commands: their words without a terminal, and what is refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.api import verbs
from gossamer.cli import main
from gossamer.view.run_directory import RunDirectory
from view.streams import run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "runs" / "20261125-llama")
    for record in run(200):
        directory.append(record)
    return tmp_path / "runs"


def test_without_a_terminal_it_says_once_how_the_run_stands(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(" done  20261125-llama") and "step 200 / 200" in shown
    assert "loss by step 200" in shown


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "llama", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["steps"], said["outcome"]) == ("done", 200, "done")


def test_of_no_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "mamba"]) == 2
    said = capsys.readouterr().err
    assert "wanted a run directory at runs/mamba, got no such folder, and runs has no run of that name" in said


def test_without_textual_it_says_how_to_install_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "gossamer.view.watch.app":
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
        return plain(name, *rest)

    monkeypatch.setattr("gossamer.cli.watch._is_terminal", lambda: True)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["watch"]) == 2
    said = capsys.readouterr().err
    assert "watch needs the package textual: " in said and "install" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--nnodes: wanted the number of nodes, got none: add --nnodes 2, say"),
        (["--nnodes", "0"], "--nnodes: wanted the number of nodes, got 0: add --nnodes 2, say"),
        (["--nnodes", "2", "--hosts", "a,b"], "--on ray takes its nodes from the cluster"),
        (["--nnodes", "2", "--node-rank", "0"], "--on ray numbers the nodes itself"),
        (["--nnodes", "2", "machines.hosts=[a]"], "machines.hosts: wanted no hosts with --on ray, got ['a']"),
    ],
)
def test_on_ray_with_what_does_not_go_together(
    tmp_path: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("train: {batch: 16}\n")
    assert main(["train", str(tmp_path / "run.yaml"), "--on", "ray", *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(verbs, "train_command", lambda resolved, **given: calls.append(given) or {})
    (tmp_path / "run.yaml").write_text("train: {batch: 16}\n")
    assert main(["train", str(tmp_path / "run.yaml"), "--on", "ray", "--nnodes", "3"]) == 0
    assert (calls[0]["ray_nodes"], calls[0]["node"]) == (3, None)
