"""The main job as a user starts it: train, stop, go on, sample, export; under other launchers; from Python."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import Dataset

import gossamer
from gossamer.api import verbs
from ports import free_port
from system.command import (
    SIZES,
    Done,
    InThisProcess,
    Place,
    ended,
    eventually,
    losses,
    records,
    under_torchrun,
)
from system.conftest import Trained


def test_a_run_leaves_its_files_and_one_json_line(trained: Trained) -> None:
    said = trained.done.last()
    assert (said["outcome"], said["steps"], said["ranks"], said["rejected_steps"]) == ("done", 6, 2, 0)
    assert Path(trained.place.folder, said["directory"]) == trained.run
    assert sum(line.startswith("{") for line in trained.done.out.splitlines()) == 1
    assert trained.done.err == ""
    names = {path.name for path in trained.run.iterdir()}
    assert {"run.yaml", "plan.yaml", "provenance.json", "records.jsonl", "checkpoints", "logs"} <= names
    assert sorted(p.name for p in (trained.run / "checkpoints").iterdir()) == [f"step-{s:08d}" for s in (2, 4, 6)]
    steps = records(trained.run, "step")
    assert [tuple(step["samples"]) for step in steps] == [(4 * i, 4 * i + 4) for i in range(6)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert records(trained.run, "evaluation")[-1]["bits_per_byte"] > 0
    assert [end["outcome"] for end in records(trained.run, "end")] == ["done"]


def test_metered_bytes_are_the_forecast(trained: Trained) -> None:
    said = trained.done.last()
    forecast = {link: count for link, count in said["forecast"]["wire_bytes"].items() if link.startswith("0>")}
    assert forecast
    assert all(step["wire_bytes"] == forecast for step in records(trained.run, "step"))


def test_a_run_is_listed_compared_and_reported_by_a_part_of_its_name(
    trained: Trained, place: Place, inside: InThisProcess
) -> None:
    copy, other = (trained.copy(place.folder / "runs" / name) for name in ("20261125-copy", "20261125-other"))
    (start,) = records(copy, "start")
    (manifest,) = (copy / "checkpoints").glob("step-00000006/manifest.json")
    assert start["data_fingerprint"] == json.loads(manifest.read_text())["body"]["parts"][0]["meta"]["data"]
    assert start["machine"]["host"] == socket.gethostname() and start["machine"]["device"] == "cpu"
    assert [run["outcome"] for run in inside.good(place, "runs", "--json").last()["runs"]] == ["done", "done"]
    said = inside.good(place, "compare", "other", "runs/20261125-copy", "--json").last()
    assert said["is_same_data"] is True and said["warnings"] == said["differences"] == [] and said["at"] == 6
    told = inside.good(place, "report", "copy", "--json").last()
    assert Path(place.folder, told["html"]) == copy / "report.html" and Path(place.folder, told["markdown"]).is_file()
    assert inside.good(place, "sample", "other", "a", "--json").last()["prompt"] == "a"
    assert other.is_dir()


@pytest.mark.nightly
def test_resume_with_more_steps_goes_on_at_the_next_sample(trained: Trained, place: Place) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    said = trained.place.good("resume", run, "train.steps=8", "--json").last()
    assert (said["outcome"], said["steps"]) == ("done", 8)
    assert [start["step"] for start in records(run, "start")] == [0, 6]
    assert [tuple(step["samples"]) for step in records(run, "step")][6:] == [(24, 28), (28, 32)]
    assert {**losses(run), **losses(trained.run)} == losses(run)


@pytest.mark.nightly
def test_resume_with_another_plan_plans_again(trained: Trained, place: Place) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    wanted = ("plan.sync={local_sgd: {sync_every: 2}}", "plan.sharding=zero1")
    for steps, asked in zip((10, 12), (wanted[:1], ("plan.sync=every_step", wanted[1])), strict=True):
        trained.place.good("resume", run, f"train.steps={steps}", *asked)
    kept = yaml.safe_load((run / "plan.yaml").read_text())
    assert (kept["sync"], kept["sharding"]) == ("every_step", "zero1")
    sent = [sum(step["wire_bytes"].values()) for step in records(run, "step")][6:]
    assert [n > 1000 for n in sent] == [False, True, False, True, True, True]


def test_resume_on_another_number_of_ranks(trained: Trained, place: Place) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    for step in (4, 6):
        for file in (run / "checkpoints" / f"step-{step:08d}").iterdir():
            file.unlink()
        (run / "checkpoints" / f"step-{step:08d}").rmdir()
    trained.place.good("resume", run, "machines.processes=1")
    assert [(start["step"], start["ranks"]) for start in records(run, "start")] == [(0, 2), (2, 1)]
    assert losses(run) == pytest.approx(losses(trained.run), rel=1e-5)


@pytest.mark.nightly
def test_of_a_run_by_bytes_no_checkpoint_is_needed(place: Place) -> None:
    """From the model of the configuration to the last step, and further, on another number of ranks."""
    train = {"optimizer": {"sgd": {"lr": 1e-4}}, "lr_schedule": "constant"}
    config = place.config(plan={"sync": "just_one_byte"}, train=train, machines={"processes": 2})
    place.good("train", config)
    (run,) = place.runs()
    assert [step["wire_bytes"] for step in records(run, "step")] == [{"0>1": 1 + 8 + 40}] * 4
    for folder in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    place.good("resume", run, "train.steps=5", "machines.processes=1")
    assert [event["message"] for event in records(run, "event")][-1].startswith("took steps 1 to 4 again")
    assert [step["step"] for step in records(run, "step")] == [1, 2, 3, 4, 5]
    assert [start["step"] for start in records(run, "start")] == [0, 4]


def watched(place: Place, *, steps: int, processes: int = 2, **changes: dict[str, object]) -> Path:
    train = {"steps": steps, "checkpoint_every": 5}
    return place.config(model={"factory": "watched:make"}, train=train, machines={"processes": processes}, **changes)


def held(place: Place, config: Path, *more: str) -> subprocess.Popen[str]:
    """A run of two ranks that waits in the seventh or eighth step until the file `hold` goes."""
    (place.folder / "hold").write_text("7")
    process = place.start("train", config, *more, is_fresh=True)
    marks = [place.folder / f"held-{rank}" for rank in (0, 1)]
    eventually(lambda: all(mark.exists() for mark in marks) or process.poll() is not None, "both ranks are held")
    if process.poll() is not None:
        pytest.fail(str(ended(process)))
    return process


@pytest.mark.nightly
def test_stopped_by_a_scheduler_and_requeued_it_is_the_same_run_bit_for_bit(place: Place) -> None:
    config = watched(place, steps=14)
    process = held(place, config, "--resume", "auto")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "saving a checkpoint first" in process.stderr.readline()
    (place.folder / "hold").unlink()
    stopped = ended(process)
    assert stopped.code == 4, stopped.err
    (run,) = place.runs()
    (end,) = records(run, "end")
    assert end["outcome"] == "interrupted"
    assert 5 < end["step"] < 14
    assert f"gossamer resume {run.relative_to(place.folder)}" in stopped.err
    assert (run / "checkpoints" / f"step-{end['step']:08d}" / "manifest.json").exists()

    place.good("train", config, "--resume", "auto")
    assert place.runs() == [run], "it went on with the same run"
    assert [start["step"] for start in records(run, "start")] == [0, end["step"]]
    assert [tuple(step["samples"]) for step in records(run, "step")] == [(4 * i, 4 * i + 4) for i in range(14)]

    place.good("train", config, "run.directory=whole")
    (whole,) = place.runs("whole")
    assert losses(run) == losses(whole)


def test_ctrl_c_once_saves_and_stops(place: Place) -> None:
    process = held(place, watched(place, steps=14), "--json")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert process.stderr is not None
    assert "ask once more to stop at once" in process.stderr.readline()
    (place.folder / "hold").unlink()
    stopped = ended(process)
    assert stopped.code == 4, stopped.err
    assert "Traceback" not in stopped.err
    assert (stopped.last()["exit"], "gossamer resume" in stopped.last()["error"]) == (4, True)
    (run,) = place.runs()
    assert (run / "checkpoints" / f"step-{records(run, 'end')[0]['step']:08d}").is_dir()


def test_ctrl_c_saves_though_nobody_reads_any_more(place: Place) -> None:
    process = held(place, watched(place, steps=14))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as of `2>&1 | tee`, which dies of the same Ctrl-C
    process.stderr.close()
    os.killpg(process.pid, signal.SIGINT)
    (place.folder / "hold").unlink()
    assert process.wait(timeout=300) == 4
    (run,) = place.runs()
    (end,) = records(run, "end")
    assert end["outcome"] == "interrupted"
    assert (run / "checkpoints" / f"step-{end['step']:08d}" / "manifest.json").exists()


@pytest.mark.nightly
def test_ctrl_c_does_not_wait_for_a_round_of_islands(place: Place) -> None:
    process = held(place, watched(place, steps=20, plan={"sync": {"diloco": {"sync_every": 50}}}))
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert "ask once more to stop at once" in process.stderr.readline()
    (place.folder / "hold").unlink()
    stopped = ended(process)
    assert stopped.code == 4, stopped.err
    (run,) = place.runs()
    (end,) = records(run, "end")
    assert end["step"] < 13
    place.good("resume", run)
    assert [start["step"] for start in records(run, "start")] == [0, end["step"]]
    assert [step["step"] for step in records(run, "step")] == [*range(1, 21)]


def test_ctrl_c_twice_stops_now(place: Place) -> None:
    process = held(place, watched(place, steps=14))
    (run,) = place.runs()
    eventually(lambda: (run / "checkpoints" / "step-00000005").is_dir(), "the checkpoint of step 5")
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert "ask once more" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    stopped = ended(process)  # though no rank can finish its step
    assert stopped.code == 3
    assert "before a new checkpoint was saved" in stopped.err
    assert "Traceback" not in stopped.err
    eventually(lambda: not place.living(), "the end of all processes")
    assert sorted(p.name for p in (run / "checkpoints").iterdir() if not p.name.startswith(".")) == ["step-00000005"]


def test_sample_goes_on_with_a_text(trained: Trained, inside: InThisProcess) -> None:
    said = inside.good(trained.place, "sample", trained.run, "stone river", "--max-new-tokens", "12", "--json").last()
    assert said["prompt"] == "stone river"
    assert said["text"]


def test_the_export_loads_in_transformers_and_is_never_overwritten(
    trained: Trained, place: Place, monkeypatch: pytest.MonkeyPatch, inside: InThisProcess
) -> None:
    from transformers import AutoModelForCausalLM

    target = place.folder / "exported"
    inside.good(trained.place, "export", trained.run, "--to", "hf", target)
    ids = torch.arange(24).view(2, 12) * 7 % 257
    monkeypatch.chdir(trained.place.folder)
    with torch.no_grad():
        ours = verbs.load(trained.run).module(input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(target).eval()(input_ids=ids).logits
    assert torch.equal(ours, theirs)

    before = {file: file.stat().st_mtime_ns for file in target.iterdir()}
    again = inside.run(place, "export", trained.run, "--to", "hf", target)
    assert again.code == 2
    assert f"{target} exists already" in again.err
    assert "Traceback" not in again.err
    assert {file: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_started_by_torchrun_it_is_the_same_run(trained: Trained, place: Place) -> None:
    config = place.config(train={"steps": 6}, run={"name": "together"})
    port = free_port()
    both = [place.start("train", config, "--json", **under_torchrun(rank, 2, port)) for rank in (0, 1)]
    done = [ended(process) for process in both]
    assert [d.code for d in done] == [0, 0], done
    assert done[0].last()["outcome"] == "done"
    assert "step       6/6" in done[0].out, "rank 0 shows the run"
    assert losses(place.folder / "runs" / "together") == losses(trained.run)


def test_started_by_torchrun_without_a_name_is_refused(place: Place) -> None:
    refused = place.run("train", place.config(), **under_torchrun(0, 2, 1))
    assert refused.code == 2
    assert "run.name" in refused.err
    assert not place.runs()


def test_a_rank_that_starts_late_does_not_resume_the_run_that_rank_0_has_just_begun(place: Place) -> None:
    machines = {"timeout_s": 30, "threads": 1}
    config, port = place.config(run={"name": "late"}, machines=machines), free_port()
    run = place.folder / "runs" / "late"
    first = place.start("train", config, "--resume", "auto", **under_torchrun(0, 2, port))
    eventually(lambda: (run / "run.yaml").exists() or first.poll() is not None, "rank 0 writes its settings")
    second = place.start("train", config, "--resume", "auto", **under_torchrun(1, 2, port))
    done = [ended(process) for process in (first, second)]
    assert [d.code for d in done] == [0, 0], done
    assert [start["step"] for start in records(run, "start")] == [0]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A dataset of a user."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) * (index + 3)) % 257
        return {"input_ids": ids, "labels": ids}


def test_train_takes_a_module_and_a_dataset(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    before = model.lm_head.weight.detach().clone()
    config = {
        "train": {"steps": 3, "batch": 4, "checkpoint_every": 0},
        "data": {"sequence": 16},
        "run": {"directory": str(tmp_path / "runs"), "display": "quiet"},
    }
    said = gossamer.train(model, Rows(), config)
    assert (said["outcome"], said["steps"], said["ranks"]) == ("done", 3, 1)
    assert not torch.equal(model.lm_head.weight, before), "it is the caller's own model that was trained"
    (run,) = (tmp_path / "runs").iterdir()
    assert len(losses(run)) == 3


LOOP = """
import json, os, sys
import torch, gossamer
from transformers import LlamaConfig, LlamaForCausalLM
from torch.utils.data import DataLoader

def rows():
    for index in range(24):
        ids = (torch.arange(16) * (index + 3)) % 257
        labels = ids.clone()
        labels[: index % 5] = -100  # ranks do not have equally many labels
        yield {"input_ids": ids, "labels": labels}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[2])))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(list(rows()), batch_size=4)
model, optimizer, loader = gossamer.wrap(model, optimizer, loader, max_grad_norm=0.5)
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({k: v.clone() for k, v in model.state_dict().items()}, f"{sys.argv[1]}-{os.environ.get('RANK', 'alone')}.pt")
"""


@pytest.mark.nightly
def test_ones_own_loop_on_two_processes_is_the_loop_on_one(place: Place) -> None:
    (place.folder / "loop.py").write_text(LOOP)
    program = (sys.executable, str(place.folder / "loop.py"))
    argv = (str(place.folder / "model"), json.dumps(SIZES))
    port = free_port()
    several = [place.start(*argv, program=program, **under_torchrun(rank, 2, port)) for rank in (0, 1)]
    done: list[Done] = [ended(process) for process in several]
    done.append(place.run(*argv, program=program))
    assert [d.code for d in done] == [0, 0, 0], done
    first, second, alone = (torch.load(place.folder / f"model-{name}.pt") for name in ("0", "1", "alone"))
    for name, wanted in alone.items():
        assert torch.equal(first[name], second[name]), name
        # the warm-up of AdamW divides tiny gradients by their own size: compare on the scale of a step
        assert torch.allclose(first[name], wanted, rtol=1e-4, atol=1e-5), name
