"""Runs in phases by the real command: one after the other, killed at any place, and looked at by every command."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer.store.start_folder import StartFolder
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_glance import glances
from gossamer.view.watch.run_choice import choose_run
from ports import free_port
from system.command import SIZES, Done, Place, ended, eventually, losses, records, under_torchrun

PHASES: list[dict[str, Any]] = [
    {"name": "first"},
    {
        "name": "second",
        "data": {"source": "text:corpus/1.txt"},
        "train": {"steps": 6, "optimizer": {"adamw": {"lr": 1e-4}}},
    },
]


@pytest.fixture
def place(tmp_path: Path) -> Any:
    made = Place.make(tmp_path)
    yield made
    made.end_all()


DEEP = {"model": {"config": {**SIZES, "num_hidden_layers": 4}}}
GROWN: list[dict[str, Any]] = [
    {"name": "small"},
    {"name": "large", "by": "g_stack", **DEEP},
    {"name": "sparse", "by": {"magnitude": {"sparsity": 0.5}}, **DEEP},
]

EXACT = {"exchange": "dense"}  # `auto` measures, and may choose bf16


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(gossamer.load(run).module.named_parameters())


def test_a_phase_begins_with_the_weights_of_the_one_before_and_commands_find_the_last(place: Place) -> None:
    done = place.good("train", place.config(train={"phases": PHASES}), "--json").last()
    (run,) = place.runs()
    assert done["directory"] == str(run.relative_to(place.folder)) and done["outcome"] == "done"
    assert [(one["name"], one["steps"]) for one in done["phases"]] == [("first", 4), ("second", 6)]
    first, second = (run / "phases" / name for name in ("01-first", "02-second"))
    start, before = StartFolder(run / "starts" / "02-second"), weights(first)
    assert start.method == "continue" and start.said["step"] == 4
    assert start.kinds().keys() == before.keys()
    for name, one in before.items():
        torch.testing.assert_close(start.tensor(name), one.detach(), rtol=0, atol=0)
    assert sorted(losses(second)) == [1, 2, 3, 4, 5, 6]
    found = gossamer.load(run)
    assert (found.step, found.config.train.steps) == (6, 6)
    for name, one in weights(second).items():
        torch.testing.assert_close(dict(found.module.named_parameters())[name], one, rtol=0, atol=0)
    (seen,) = glances(place.folder / "runs")
    assert (seen.name, seen.step, seen.outcome) == (run.name, 6, "done")
    assert choose_run(str(run), place.folder / "runs").path == second
    again = place.good("resume", run, "--json").last()
    assert [one["steps"] for one in again["phases"]] == [4, 6] and len(records(second, "start")) == 1


@pytest.mark.nightly
def test_a_phase_that_was_killed_goes_on_on_two_processes(place: Place) -> None:
    watched = {"factory": "watched:make"}
    hold = place.folder / "hold"
    hold.write_text("9")  # forwards of the process: of a phase
    phases = [PHASES[0], {**PHASES[1], "train": {**PHASES[1]["train"], "steps": 12}}]
    command = place.start("train", place.config(model=watched, train={"phases": phases, "steps": 4}))
    (run,) = (eventually(lambda: bool(place.runs()), "a run"), place.runs())[1]
    second = run / "phases" / "02-second"
    eventually(lambda: (place.folder / "held-0").exists(), "it is held in its second phase", within_s=120)
    assert sorted(losses(run / "phases" / "01-first")) == [1, 2, 3, 4]
    command.send_signal(signal.SIGKILL)
    ended(command)
    hold.unlink()
    eventually(lambda: not place.living(), "its workers are gone")
    done = place.good("resume", run, "machines.processes=2", "--json").last()
    assert done["outcome"] == "done" and done["phases"][1]["steps"] == 12 and done["ranks"] == 2
    starts = records(second, "start")
    assert [one["ranks"] for one in starts] == [1, 2] and starts[1]["step"] >= 2
    assert len(records(run / "phases" / "01-first", "start")) == 1, "what is done stays"
    more = place.good("resume", run, "train.steps=5", "--json")
    assert "phase first is done" in more.err and "train.steps" in more.err, "it is said that this changes nothing"


@pytest.mark.nightly
def test_an_interrupted_phase_says_how_to_go_on(place: Place) -> None:
    (place.folder / "hold").write_text("3")
    command = place.start("train", place.config(model={"factory": "watched:make"}, train={"phases": PHASES}))
    eventually(lambda: (place.folder / "held-0").exists(), "it is held in its first phase", within_s=120)
    command.send_signal(signal.SIGINT)
    (place.folder / "hold").unlink()
    done = ended(command)
    (run,) = place.runs()
    assert done.code == 4 and f"gossamer resume runs/{run.name}" in done.err and "phase first" in done.err
    assert place.good("resume", run, "--json").last()["phases"][1]["steps"] == 6


@pytest.mark.nightly
def test_a_run_that_died_between_phases_makes_the_start_folder_anew(place: Place) -> None:
    place.good("train", place.config(train={"phases": PHASES}))
    (run,) = place.runs()
    expected = losses(run / "phases" / "02-second")
    shutil.rmtree(run / "phases" / "02-second")
    whole = run / "starts" / "02-second"
    partial = whole.with_name(".02-second.partial")
    whole.rename(partial)  # as it is while it is written
    (partial / "start.json").unlink()
    done = place.good("resume", run, "--json").last()
    assert done["phases"][1]["steps"] == 6 and not partial.exists()
    assert losses(run / "phases" / "02-second") == expected
    assert len(records(run / "phases" / "01-first", "start")) == 1


@pytest.mark.nightly
def test_a_phase_that_cannot_run_leaves_nothing(place: Place) -> None:
    phases = [PHASES[0], {"name": "wide", "model": {"config.hidden_size": 64}}]
    done = place.run("train", place.config(train={"phases": phases}))
    assert done.code == 2 and "phase wide" in done.err and not place.runs()


@pytest.mark.nightly
def test_a_small_model_is_grown_and_pruned_and_each_time_trained_on(place: Place) -> None:
    phases = [
        {"name": "small"},
        {"name": "large", "by": "g_stack", "model": {"config": {**SIZES, "num_hidden_layers": 4}}},
        {
            "name": "sparse",
            "by": {"magnitude": {"sparsity": 0.5}},
            "model": {"config": {**SIZES, "num_hidden_layers": 4}},
        },
    ]
    done = place.good("train", place.config(train={"phases": phases}), "--json").last()
    assert [one["steps"] for one in done["phases"]] == [4, 4, 4]
    (run,) = place.runs()
    assert StartFolder(run / "starts" / "02-large").method == "g_stack"
    assert StartFolder(run / "starts" / "03-sparse").kinds("masks.safetensors")
    assert len(gossamer.load(run).module.model.layers) == 4
    assert json.loads((run / "starts" / "03-sparse" / "config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.nightly
def test_an_adapter_is_merged_into_what_the_next_phase_begins_with(place: Place) -> None:
    phases = [
        {"name": "low", "model": {"adapter": {"lora": {"rank": 2}}}, "train": {"optimizer.adamw.lr": 0.1}},
        {"name": "all"},
    ]
    place.good("train", place.config(train={"phases": phases}))
    (run,) = place.runs()
    low, start = gossamer.load(run / "phases" / "01-low"), StartFolder(run / "starts" / "02-all")
    name = "model.layers.0.self_attn.q_proj"
    layer = low.module.get_submodule(name)
    ids = torch.arange(12).reshape(2, 6)
    found = gossamer.load(run).module
    assert start.kinds().keys() == {name for name, _ in found.named_parameters()}
    with torch.no_grad():
        for key, param in found.named_parameters():
            param.copy_(start.tensor(key))
        torch.testing.assert_close(found(input_ids=ids).logits, low.module(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    assert type(layer) is not torch.nn.Linear, "the first phase trained an adapter"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_instant_it_goes_on(place: Place, seed: int) -> None:
    """Three times at an instant that is drawn; then to its end, with the steps of every phase once each."""
    draw = random.Random(seed)
    command = place.start("train", place.config(train={"phases": [*PHASES, {"name": "third"}]}))
    for _ in range(3):
        time.sleep(draw.uniform(1.0, 14.0))
        command.send_signal(signal.SIGKILL)
        ended(command)
        eventually(lambda: not place.living(), "its workers are gone")
        begun = [one for one in place.runs() if (one / "run.yaml").is_file()]
        command = place.start(*(("resume", begun[-1]) if begun else ("train", "run.yaml")))
    done = ended(command)
    assert done.code == 0, done.err[-2000:]
    run = place.runs()[-1]
    for phase, steps in zip(RunDirectory(run).phases, (4, 6, 4), strict=True):
        assert sorted(losses(phase.path)) == list(range(1, steps + 1))
        assert gossamer.load(phase.path).step == steps


@pytest.mark.nightly
def test_a_start_of_other_settings_is_made_anew(place: Place) -> None:
    def phases(sparsity: float) -> list[dict[str, Any]]:
        return [{"name": "a"}, {"name": "b", "by": {"magnitude": {"sparsity": sparsity}}}]

    place.good("train", place.config(train={"phases": phases(0.5)}))
    (run,) = place.runs()
    shutil.rmtree(run / "phases" / "02-b")  # it never began
    file = run / "run.yaml"
    file.write_text(file.read_text().replace("0.5", "0.25"))
    place.good("resume", run)
    assert StartFolder(run / "starts" / "02-b").method == {"magnitude": {"sparsity": 0.25}}


@pytest.mark.nightly
def test_epsilon_and_masks_go_through_all_phases(place: Place) -> None:
    """A width that is no multiple changes the epsilon; masks hold over a phase that goes on."""
    wide = {"config": {**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}}
    first = {"config": {**SIZES, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}}
    held = {"train": {"optimizer": {"static_mask": {"masks": "start"}}}}
    phases = [
        {"name": "small", "model": first},
        {"name": "large", "by": "lemon", "model": wide},
        {"name": "longer", "model": wide},
        {"name": "sparse", "by": "magnitude", "model": wide, **held},
        {"name": "on", "model": wide, **held},
    ]
    place.good("train", place.config(train={"phases": phases}))
    (run,) = place.runs()
    starts = [StartFolder(one) for one in sorted((run / "starts").iterdir())]
    assert len(starts) == 4 and all(one.attributes == starts[0].attributes != {} for one in starts)
    assert [bool(one.kinds("masks.safetensors")) for one in starts] == [False, False, True, True]
    state = weights(run)
    for name, mask in starts[3].masks():
        zeros = state[name].detach()[~mask.bool()]
        assert zeros.numel() and not zeros.any()


class Hosts:
    """Two hosts with folders of their own on this machine, on each of which the command is started by hand."""

    def __init__(self, place: Place) -> None:
        self.places = [Place.make(place.folder / f"host-{number}") for number in range(2)]

    def start(self, phases: list[dict[str, Any]], *more: str, **changes: Any) -> list[subprocess.Popen[str]]:
        address = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
        return [
            one.start(
                "train", one.config(train={"phases": phases}, **changes), "--node-rank", f"{rank}", *address, *more
            )
            for rank, one in enumerate(self.places)
        ]

    def run(self, phases: list[dict[str, Any]], *more: str, **changes: Any) -> list[Done]:
        try:
            return [ended(one) for one in self.start(phases, *more, **changes)]
        finally:
            self.end_all()

    def end_all(self) -> None:
        for one in self.places:
            one.end_all()


def equal(run: Path, others: list[Path]) -> bool:
    """Whether all ended with the same weights, bit for bit."""
    wanted, found = weights(run), [weights(other) for other in others]
    return all(one.keys() == wanted.keys() and all(torch.equal(one[k], wanted[k]) for k in wanted) for one in found)


@pytest.mark.nightly
def test_hosts_with_disks_of_their_own_go_through_the_phases_together(place: Place) -> None:
    hosts = Hosts(place)
    done = hosts.run(GROWN[:2], "--json")
    assert [one.code for one in done] == [0, 0], done
    assert [one["steps"] for one in done[0].last()["phases"]] == [4, 4]
    first, second = (one.runs()[0] for one in hosts.places)
    starts = [
        {file.name: file.read_bytes() for file in (run / "starts" / "02-large").iterdir()} for run in (first, second)
    ]
    assert first.name == second.name and starts[0] == starts[1]
    assert equal(first, [second]) and records(first / "phases" / "02-large", "start")[0]["ranks"] == 2


@pytest.mark.nightly
def test_wherever_they_run_phases_end_with_the_same_weights(place: Place) -> None:
    """Two ranks: of one host, of torchrun, and of two hosts without a common disk; killed in between and gone on."""
    place.good("train", place.config(train={"phases": GROWN}, machines={"processes": 2}, plan=EXACT))
    (reference,) = place.runs()
    ranks, port = place.config("ranks", train={"phases": GROWN}, run={"name": "ranks"}, plan=EXACT), free_port()
    both = [place.start("train", ranks, "--json", **under_torchrun(rank, 2, port)) for rank in (0, 1)]
    done = [ended(one) for one in both]
    assert [one.code for one in done] == [0, 0], done
    assert done[0].last()["phases"][2]["steps"] == 4 and "lost a peer" not in done[1].err
    hosts = Hosts(place)
    try:
        started = hosts.start(GROWN, plan=EXACT)
        saved = "runs/*/phases/02-large/checkpoints/step-*2"
        eventually(lambda: [*hosts.places[0].folder.glob(saved)] != [], "a step is saved", within_s=240)
        started[1].send_signal(signal.SIGKILL)
        assert [ended(one).code for one in started] == [3, -signal.SIGKILL]
    finally:
        hosts.end_all()
    assert [one.code for one in hosts.run(GROWN, "--resume", "auto", plan=EXACT)] == [0, 0]
    assert equal(reference, [place.folder / "runs" / "ranks", *(one.runs()[0] for one in hosts.places)])
    assert [len(one.runs()) for one in hosts.places] == [1, 1]


@pytest.mark.nightly
def test_ranks_of_torchrun_stop_and_go_on_within_a_phase(place: Place) -> None:
    phases = [PHASES[0], {**PHASES[1], "train": {**PHASES[1]["train"], "steps": 12}}]
    config = place.config(model={"factory": "watched:make"}, train={"phases": phases}, run={"name": "r"})

    def both(*more: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        return [place.start("train", config, *more, **under_torchrun(rank, 2, port)) for rank in (0, 1)]

    hold = place.folder / "hold"
    hold.write_text("9")  # forwards of a phase
    started = both()
    eventually(lambda: (place.folder / "held-1").exists(), "they are held in the second phase", within_s=120)
    for one in started:
        one.send_signal(signal.SIGTERM)
    hold.unlink()
    done = [ended(one) for one in started]
    assert [one.code for one in done] == [4, 4] and "stopped in phase second" in done[0].err, done
    again = [ended(one) for one in both()]
    assert [one.code for one in again] == [2, 2] and all("--resume auto" in one.err for one in again)
    assert [one.code for one in map(ended, both("--resume", "auto"))] == [0, 0]
    second = place.folder / "runs" / "r" / "phases" / "02-second"
    assert sorted(losses(second)) == [*range(1, 13)] and len(records(second, "start")) == 2
    assert len(records(place.folder / "runs" / "r" / "phases" / "01-first", "start")) == 1


@pytest.mark.nightly
def test_what_the_first_cannot_prepare_ends_all_with_its_message(place: Place) -> None:
    config = place.config(train={"phases": PHASES}, run={"name": "r"})
    (place.folder / "runs" / "r").mkdir(parents=True)
    (place.folder / "runs" / "r" / "starts").write_text("a file where the folder should be")
    port = free_port()
    both = [place.start("train", config, **under_torchrun(rank, 2, port)) for rank in (0, 1)]
    done = [ended(one) for one in both]
    assert [one.code for one in done] == [2, 2] and all(
        "phase second: run.directory: wanted a folder" in one.err for one in done
    ), done


@pytest.mark.nightly
def test_hosts_without_a_common_disk_need_whole_weights_on_one(place: Place) -> None:
    for name, plan in (("stages", {"mesh": {"pipe": 2}}), ("rows", {"sharding": "zero3"})):
        done = Hosts(Place.make(place.folder / name)).run(PHASES, plan=plan)
        assert [one.code for one in done] == [2, 2], done
        assert all(
            "phase second: run.directory: wanted a phase before whose weights are whole" in one.err for one in done
        )
