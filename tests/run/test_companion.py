"""Adversarial training with a companion process: the numbers of one process bit for bit, its faults, refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import gossamer
from gossamer.data.ordering import SampleOrder
from gossamer.plan import Request, build
from gossamer.process.companion_link import CompanionLink
from gossamer.process.json_channel import JsonChannel
from gossamer.process.spawn import process_state
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.run.companion_messages import TO_RANK, Done, Ready, Setup, SharedForm
from gossamer.run.companion_process import _share
from gossamer.run.shared_tensors import SharedTensors, TensorForm
from gossamer.spec import records
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.spec.plan import Plan
from gossamer.store.checkpoint import CheckpointSource, open_checkpoint
from gossamer.store.slices import Slice
from run.companion_models import Images, Net

STEPS = 5


def config(folder: Path, **adversarial: Any) -> dict[str, Any]:
    return {
        "train": {
            "steps": STEPS,
            "batch": 8,
            "accumulate": 2,
            "optimizer": {"sgd": {"lr": 0.1, "momentum": 0.9}},
            "lr_schedule": "constant",
            "max_grad_norm": 0.0,
            "loss": "classification",
            "evaluate_every": 0,
            "on_nonfinite": "skip",
            "adversarial": {"epsilon": 0.1, "delay": 1, **adversarial},
        },
        "machines": {"threads": 1},
        "run": {"directory": str(folder), "name": "a", "display": "quiet"},
    }


def model(name: str, **given: Any) -> dict[str, Any]:
    return {"factory": f"run.companion_models:{name}", "config": given}


def saved(found: dict[str, Any], step: int = STEPS) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint: weights, momenta, what is kept of the last step, both statistics."""
    source = CheckpointSource(open_checkpoint(Path(found["directory"], "checkpoints"), step))
    found = {}
    for name in source.names():
        for version in source.versions(name):
            shape, _ = source.kind(name, version)
            found[f"{name} {version}"] = source.read(Slice.whole(name, shape, version))
    return found


def test_it_is_the_form_of_one_process_bit_for_bit_also_stopped_and_resumed(tmp_path: Path) -> None:
    """Micro-batches, dropout, frozen weights, a buffer that the output depends on, and a last step that is rejected."""

    def stop(record: Any) -> str | None:
        return "stop" if isinstance(record, records.Step) and record.step == 3 else None

    data = Images(bad=int(SampleOrder(0, 64)(np.array([8 * STEPS - 1]))[0]))
    one = gossamer.train(model("net"), data, config(tmp_path / "one"))
    stopped = gossamer.train(model("net"), data, config(tmp_path / "two", ahead=True), callbacks=[stop])
    two = gossamer.train(model("net"), data, config(tmp_path / "two", ahead=True), resume="auto")
    assert (one["rejected_steps"], stopped["steps"], two["steps"]) == (1, 4, STEPS)
    wanted, found = saved(one), saved(two)
    assert wanted.keys() == found.keys() and any(name.startswith("adversarial/buffers/") for name in wanted)
    for name, value in wanted.items():
        assert torch.equal(value.nan_to_num(), found[name].nan_to_num()), name
    (shift,) = (value for name, value in wanted.items() if name.startswith("adversarial/buffers/shift"))
    assert bool(shift.abs().max() > 0)


@pytest.mark.parametrize(
    ("name", "given", "kind", "said"),
    [
        ("fragile", {"fault": "killed"}, RunFailed, "ended with signal SIGKILL before the perturbation of step 2"),
        pytest.param(
            "fragile", {"fault": "failed"}, RunFailed, "ArithmeticError: a companion's own", marks=pytest.mark.nightly
        ),
        ("counting", {}, BadInput, "changes nothing but buffers.*a change of forwards"),
        pytest.param("unlike", {}, BadInput, "a model of the .* that the rank has", marks=pytest.mark.nightly),
        pytest.param("other", {}, BadInput, "the same perturbation of image", marks=pytest.mark.nightly),
    ],
)
def test_a_companion_that_cannot_go_on_ends_the_run(
    tmp_path: Path, name: str, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        gossamer.train(model(name, **given), Images(), config(tmp_path, ahead=True))


def test_a_companion_that_says_nothing_is_ended() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    asked: list[bool] = []
    link: CompanionLink[Ready | Done] = CompanionLink(process, JsonChannel(ours, TO_RANK), 0.1, "it", "this", "that")
    with theirs, pytest.raises(RunFailed, match=r"said nothing for 0.1 s and was ended"):
        link.wait("step 3", lambda: asked.append(len(asked) > 1) or asked[-1])  # after 2 looks there is work for it
    link.close()
    assert process.returncode == -signal.SIGKILL and asked == [False, False, True]


def test_the_time_for_which_a_rank_was_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ctrl-Z both stop. The message comes after the rank has looked at its clock, an hour later."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    link: CompanionLink[Ready | Done] = CompanionLink(process, JsonChannel(ours, TO_RANK), 9.0, "it", "this", "that")
    stopped_s = iter([0.0])

    def is_due() -> bool:
        JsonChannel(theirs, TO_RANK).send(Ready())
        return True

    def clock() -> float:
        return time.monotonic() + next(stopped_s, 3600.0)

    with theirs, monkeypatch.context() as patched:
        patched.setattr("gossamer.process.companion_link.time", SimpleNamespace(monotonic=clock))
        assert link.wait("step 3", is_due) == Ready()
    link.close()


def test_two_processes_see_the_same_tensors() -> None:
    """Also those without an element, and those of one byte, in the order of their forms."""
    given = [torch.arange(3.0), torch.zeros(0, 2), torch.tensor(True), torch.tensor([2**40])]
    forms = [TensorForm.of(str(n), x) for n, x in enumerate(given)]
    mine = SharedTensors.new(forms)
    for name, value in enumerate(given):
        mine.tensors[str(name)].copy_(value)
    other = SharedTensors.at(os.dup(mine.descriptor), forms)
    for name, value in enumerate(given):
        assert torch.equal(other.tensors[str(name)], value)
    mine.close()
    other.close()


def test_items_that_draw_are_refused_a_step_early() -> None:
    plan = Plan(rows=(4,), microbatches=(2,))
    quiet, drawing = (Feed(DatasetBatches(Images(draws=draws)), plan, 0, 0) for draws in (False, True))
    early = quiet.look_ahead(1)
    assert quiet.fetch(1) is early and quiet.fetch(1) is not early
    with pytest.raises(BadInput, match="draw no random numbers"):
        drawing.look_ahead(1)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"adversarial": {"epsilon": 0.1, "ahead": True}}}, "train.adversarial.delay 1 with ahead"),
        ({"train": {"adversarial": {"epsilon": 0.0, "ahead": True}}}, "epsilon above 0"),
        ({"plan": {"savers": ["recompute"]}}, "no plan.savers"),
        ({"plan": {"sharding": "zero3"}}, "zero2"),
        ({"plan": {"mesh": {"pipe": 2}}}, "no pipeline stages"),
        ({"model": {"compile": True}}, "model.compile"),
    ],
)
def test_what_it_does_not_go_with_is_refused(sections: dict[str, Any], said: str) -> None:
    train = {"batch": 8, "adversarial": {"epsilon": 0.1, "delay": 1, "ahead": True}, **sections.get("train", {})}
    asked = RunConfig.model_validate({**sections, "train": train})
    with pytest.raises(BadInput, match=said):
        build("data_parallel").plan(Request(asked, 4))


def test_a_module_that_is_built_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a model that Gossamer builds"):
        gossamer.train(Net(), Images(), config(tmp_path, ahead=True))


_PROGRAM = """
import gossamer, time
from run.companion_models import Images
from run.test_companion import config, model
from pathlib import Path
written = config(Path({folder!r}), ahead=True)
written["train"]["steps"] = 100_000
gossamer.train(model("net"), Images(), written)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_companion_outlives_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches both processes, as in a terminal, and the run is saved."""
    path = os.pathsep.join(filter(None, sys.path))
    rank = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(folder=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    companion = _companion_of(rank.pid, tmp_path)
    os.killpg(rank.pid, number) if number == signal.SIGINT else os.kill(rank.pid, number)
    rank.wait(60)
    until = time.monotonic() + 20
    while process_state(companion) not in ("", "Z"):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert any(tmp_path.glob("*/checkpoints/step-*")) == (number == signal.SIGINT)


def _companion_of(rank: int, folder: Path) -> int:
    """Return the companion of a process once that trains."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.2)
        trains = any('"step"' in file.read_text() for file in folder.glob("*/records.jsonl"))
        children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
        if trains and children:
            return int(children[0])
    raise AssertionError("no companion")


@pytest.mark.nightly
def test_two_ranks_have_a_companion_each(tmp_path: Path) -> None:
    """Sharded states and a gradient exchange: the run of two ranks without companions, bit for bit."""
    found = []
    for ahead in (False, True):
        folder = tmp_path / str(ahead)
        written = {
            "model": {"factory": "run.companion_models:net"},
            "data": {"factory": "run.companion_models:images"},
            "train": {"steps": 4, "batch": 8, "loss": "classification", "evaluate_every": 0, "optimizer": "adamw"},
            "machines": {"processes": 2, "threads": 1},
            "plan": {"sharding": "zero2", "exchange": "dense"},
            "run": {"directory": str(folder), "name": "a", "display": "plain"},
        }
        written["train"]["adversarial"] = {"epsilon": 0.1, "delay": 1, "ahead": ahead}
        folder.mkdir()
        (folder / "run.yaml").write_text(json.dumps(written))
        path = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "gossamer", "train", str(folder / "run.yaml")]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
        (directory,) = folder.glob("*/")
        found.append(saved({"directory": directory}, 4))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        if not name.startswith("rng/"):  # each process begins with random numbers of its own
            assert torch.equal(value, found[1][name]), name


def test_a_model_of_other_weights_is_refused() -> None:
    module = Net()
    forms = [TensorForm.of(name, x) for name, x in module.named_parameters()]
    setup = Setup(
        config="{}",
        units=[],
        names=[],
        inputs=[],
        threads=1,
        weights_descriptor=0,
        rows_descriptor=0,
        weights=SharedForm.all_of(forms),
        rows=[],
    )
    with pytest.raises(BadInput, match=r"a model of the 8 parameters and buffers.*num_batches_tracked"):
        _share(module, SharedTensors(0, {}), setup)
