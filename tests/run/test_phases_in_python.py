"""`gossamer.train` with phases: they run as the command runs them, and what other processes cannot get is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import gossamer
from gossamer.api import phased_run
from gossamer.api.launcher import Launcher
from gossamer.api.phase_runner.hosts import HostsRunner
from gossamer.spec.errors import BadInput, Interrupted
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory

MODEL: dict[str, Any] = {
    "hf": "llama",
    "config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
}
PHASES = [{"name": "a"}, {"name": "b", "by": {"magnitude": {"sparsity": 0.5}}, "train": {"steps": 1}}]


def sections(folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "train": {"steps": 3, "batch": 2, "evaluate_every": 0, "checkpoint_every": 0, "phases": PHASES},
        "data": {"tokenizer": "byte", "sequence": 16, "validation": 0.0, **data},
        "run": {"directory": str(folder / "runs"), "display": "quiet"},
    }


@pytest.mark.nightly
def test_phases_run_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the river walks slowly under a green lamp " * 60)
    source = f"text:{tmp_path}/text.txt"
    done = gossamer.train(MODEL, source, sections(tmp_path))
    (run,) = (tmp_path / "runs").iterdir()
    assert Path(done["directory"]) == run and done["outcome"] == "done"
    assert [(one["name"], one["steps"]) for one in done["phases"]] == [("a", 3), ("b", 1)]
    assert done.run.path == run / "phases" / "02-b" and done.steps.tolist() == [1] and len(done.losses) == 1
    before = dict(gossamer.load(run / "phases" / "01-a").module.named_parameters())
    start = StartFolder(run / "starts" / "02-b")
    for name, mask in start.masks():
        assert torch.equal(start.tensor(name), torch.where(mask, before[name].detach(), 0.0))
    again = gossamer.train(MODEL, source, sections(tmp_path), resume="auto")
    assert again["directory"] == done["directory"] and [*(tmp_path / "runs").iterdir()] == [run]


@pytest.mark.parametrize(
    ("model", "data", "given", "more", "said"),
    [
        (nn.Linear(2, 2), None, {}, {}, "the name or the section of a model with train.phases, .*got a Linear"),
        (MODEL, [{"input_ids": [1]}], {}, {}, "a source of text, or data.factory with train.phases, .*got a list"),
        (MODEL, "text:x", {"factory": "a:b"}, {}, "got both"),
        (MODEL, "text:x", {}, {"callbacks": [print]}, "no callbacks with train.phases"),
        (MODEL, "text:x", {}, {"resume": "newest"}, 'resume="auto" or None'),
        (3, "text:x", {}, {}, "wanted a model"),
        (MODEL, "text:x", {}, {"hosts": ["a", "b"]}, "machines.hosts: .*got machines.hosts a, b: .*gossamer train"),
        (MODEL, "text:x", {}, {"launcher": "torchrun"}, "got a rank of torchrun: .*-m gossamer train"),
    ],
)
def test_what_other_processes_cannot_get_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    data: Any,
    given: dict[str, Any],
    more: dict[str, Any],
    said: str,
) -> None:
    written, more = sections(tmp_path, **given), dict(more)
    if hosts := more.pop("hosts", None):
        written["machines"] = {"hosts": hosts}
    if more.pop("launcher", None):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match=said):
        gossamer.train(model, data, written, **more)
    assert not (tmp_path / "runs").exists()


def test_a_plan_of_a_module_has_no_phases(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="2 phases in a program"):
        gossamer.plan(nn.Linear(2, 2), sections(tmp_path))


class Stopped:
    """A runner whose process was asked to stop as the phase with this number was done."""

    is_first = True

    def __init__(self, as_done: int) -> None:
        self.as_done, self.trained = as_done, 0

    def agreed(self, make: Callable[[], str]) -> str:
        if self.trained >= self.as_done:
            raise Interrupted("stopped between phases")
        return make()

    def train(self, phase: Any, *, resume: bool) -> bool:
        self.trained += 1
        return self.trained >= self.as_done


@pytest.mark.parametrize("as_done", [1, 2])
def test_a_stop_as_the_last_phase_is_done_changes_nothing(monkeypatch: pytest.MonkeyPatch, as_done: int) -> None:
    """A stop as another is done says how to go on."""
    monkeypatch.setattr(phased_run, "_prepare", lambda phase, before: "")
    monkeypatch.setattr(phased_run, "_standing", lambda phase: "new")
    monkeypatch.setattr(phased_run, "_told", lambda directory, phases: {"outcome": "done"})
    phases = [SimpleNamespace(name=name, number=n, start=None, is_begun=False) for n, name in enumerate("ab", start=1)]
    runner, directory = Stopped(as_done), RunDirectory(Path("runs/x"))
    if as_done == 2:
        assert phased_run._run(runner, directory, phases) == {"outcome": "done"}  # type: ignore[arg-type]
    else:
        with pytest.raises(Interrupted, match=r"stopped in phase a, number 1 of 2.* gossamer resume runs/x"):
            phased_run._run(runner, directory, phases)  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "shared", "is_left"), [(0, True, False), (1, True, True), (1, False, False)])
def test_the_holder_alone_undoes_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: int, shared: bool, is_left: bool
) -> None:
    """Two hosts that both restore one folder may have seen different contents before."""
    directory = RunDirectory(tmp_path / "run")
    monkeypatch.setattr(HostsRunner, "agreed", lambda self, make: directory.path.mkdir())
    monkeypatch.setattr(Launcher, "met", lambda self, node, prepare: fail())
    line = SimpleNamespace(is_first=host == 0, shared=shared, host=host)
    runner = HostsRunner(SimpleNamespace(rank=host), line)  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        runner.train(SimpleNamespace(directory=directory, config=None), resume=False)  # type: ignore[arg-type]
    assert directory.path.exists() == is_left


def fail() -> NoReturn:
    raise BadInput("no such data")
