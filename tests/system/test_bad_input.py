"""What cannot work: one clear message with the numbers and what to do, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gossamer.store.checkpoint import latest_good
from ports import free_port
from system.command import (
    GOSSAMER,
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


def one_message(done: Done, *, code: int = 2) -> str:
    """What was said, as one line; nothing else was."""
    assert done.code == code, done.out[-2000:] + done.err[-2000:]
    assert "Traceback" not in done.err + done.out
    lines = done.err.splitlines()
    assert lines[0].endswith(":") and not lines[0].startswith(" "), done.err
    assert all(line.startswith("  ") for line in lines[1:]), "one block, indented under its headline:\n" + done.err
    return " ".join(" ".join(lines[1:]).split())


@dataclass(frozen=True)
class Case:
    """One row of the table: what is wrong, and what must be said about it."""

    name: str
    says: tuple[str, ...]
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: Callable[[Place], object] = lambda place: None
    argv: tuple[str, ...] = ()


def binary(place: Place) -> None:
    (place.folder / "run.yaml").write_bytes(b"\xff\xfe\x00\x01" * 20)


def broken_module(place: Place) -> None:
    (place.folder / "broken.py").write_text("import nothing_of_that_name\n\ndef make():\n    pass\n")


def empty_files(place: Place) -> None:
    for file in (place.folder / "corpus").iterdir():
        file.write_text("")


TABLE = [
    Case(
        "unknown key",
        ("run.yaml:1", "model.config", "hiden_size", "did you mean 'hidden_size'"),
        {"model": {"hf": "llama", "config": {"hiden_size": 32}}},
    ),
    Case("unknown key of a section", ("run.yaml:1", "train.bach", "'batch'"), {"train": {"bach": 3}}),
    Case(
        "unknown key of a method",
        ("run.yaml:1", "train.optimizer", "learning", "lr"),
        {"train": {"optimizer": {"adamw": {"learning": 3}}}},
    ),
    Case("wrong type", ("run.yaml:1", "train.steps", "whole number >= 1", "'many'"), {"train": {"steps": "many"}}),
    Case("impossible value", ("run.yaml:1", "train.steps", ">= 1", "got 0"), {"train": {"steps": 0}}),
    Case("impossible value by override", ("command line", "data.validation", "1.5"), argv=("data.validation=1.5",)),
    Case("missing configuration", ("there is no file", "rum.yaml", "run.yaml"), argv=("rum.yaml",)),
    Case(
        "unreadable configuration", ("run.yaml is not UTF-8 text (byte 0)", "give a YAML or TOML file"), before=binary
    ),
    Case("folder for a configuration", ("corpus is a folder",), argv=("corpus",)),
    Case("missing corpus", ("data.source", "no file matches", "none/*.txt"), {"data": {"source": "text:none/*.txt"}}),
    Case(
        "empty corpus",
        ("data.source", "the corpus is empty", "corpus/*.txt", "0 bytes", "name files with text"),
        before=empty_files,
    ),
    Case(
        "corpus shorter than a sequence",
        ("data.sequence", "at least 1000000 tokens", "lower data.sequence"),
        {"data": {"sequence": 1_000_000}},
    ),
    Case(
        "corpus shorter than a batch",
        ("train.batch", "at least 4000 training sequences", "lower train.batch"),
        {"train": {"batch": 4000}},
    ),
    Case(
        "vocabularies that disagree",
        ("100 token ids", "257", "vocab_size"),
        {"model": {"hf": "llama", "config": {**SIZES, "vocab_size": 100}}},
    ),
    Case(
        "factory that fails to import",
        ("model.factory", "nothing_of_that_name", "broken.py:1", "correct the file"),
        {"model": {"factory": "broken:make"}},
        before=broken_module,
    ),
    Case(
        "factory that is not there",
        ("model.factory", "watched has no function 'mke'", "'make'"),
        {"model": {"factory": "watched:mke"}},
    ),
    Case(
        "more ranks than sequences",
        ("train.batch", "a batch of 1 for 2 processes", "set train.batch to 2"),
        {"train": {"batch": 1}, "machines": {"processes": 2}},
    ),
    Case("unknown exchange", ("plan.exchange", "dens", "'dense'"), {"plan": {"exchange": "dens"}}),
    Case("plan that is not there", ("--plan", "no.yaml"), argv=("--plan", "no.yaml")),
]


@pytest.mark.parametrize("case", TABLE, ids=[case.name.replace(" ", "-") for case in TABLE])
def test_what_the_user_gave_is_refused_in_one_message(place: Place, inside: InThisProcess, case: Case) -> None:
    config = place.config(**case.changes)
    case.before(place)
    files = [] if case.argv and not ("=" in case.argv[0] or case.argv[0].startswith("--")) else [config]
    said = one_message(inside.run(place, "train", *files, *case.argv))
    for piece in case.says:
        assert piece in said
    assert not place.runs(), "a run that never began leaves no folder"


def test_a_disagreement_found_by_two_ranks_is_said_once(place: Place) -> None:
    config = place.config(model={"factory": "broken:make"}, machines={"processes": 2})
    broken_module(place)
    done = place.run("train", config, "--json")
    assert one_message(done).count("nothing_of_that_name") == 1
    assert done.last()["exit"] == 2
    assert not place.runs()


ORDINARY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may read every file")
def test_a_corpus_that_may_not_be_read(place: Place) -> None:
    config = place.config()
    place.text("corpus/secret.txt", words=100).chmod(0)
    as_others = ORDINARY if os.geteuid() == 0 else ()
    said = one_message(place.run("train", config, program=(*as_others, *GOSSAMER)))
    assert "corpus/secret.txt" in said
    assert "ermission denied" in said
    assert not place.runs()


# Ranks started by another launcher


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_ranks_with_different_configurations(place: Place) -> None:
    config = place.config(run={"name": "both"})
    port = free_port()
    started = [place.start("train", config, f"train.seed={rank}", **under_torchrun(rank, 2, port)) for rank in (0, 1)]
    for process in started:
        said = one_message(ended(process))
        assert "do not agree about the configuration: rank 0 and rank 1 differ." in said
        assert "Give every host the same configuration" in said
    assert not place.runs()


def test_a_run_that_is_there_is_not_trained_over(place: Place) -> None:
    """As by the same command twice, or by a launcher that restarts its ranks."""
    config = place.config(run={"name": "try1"})
    place.good("train", config, "train.steps=4", **under_torchrun(0, 1, free_port()))
    run = place.folder / "runs" / "try1"
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    for more in ((), ("--resume", "auto")):
        again = ("train", config, "train.seed=7", "train.steps=2", *more)
        said = one_message(place.run(*again, **under_torchrun(0, 1, free_port())))
        assert "wanted a new run, or --resume auto, got runs/try1, which is there already" in said
        assert "set run.name to another name" in said and ("with other settings" in said) == bool(more)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_what_lies_in_the_folder_of_a_failed_start_stays(place: Place) -> None:
    """`#SBATCH --output=runs/job-%j/out.log`, and a text that is not there."""
    log = place.text("runs/job-7/out.log", words=9)
    config = place.config(run={"name": "job-7"}, data={"source": "text:absent/*.txt"})
    said = one_message(place.run("train", config, **under_torchrun(0, 1, free_port())))
    assert "absent" in said
    assert [*(place.folder / "runs" / "job-7").iterdir()] == [log]


@pytest.mark.parametrize("name", [".", "../other", "a/b"])
def test_a_name_that_is_not_that_of_one_folder(place: Place, inside: InThisProcess, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in under_torchrun(0, 2, 1).items():
            patch.setenv(variable, f"{value}")
        said = one_message(inside.run(place, "train", place.config(run={"name": name})))
    assert f"wanted the name of one folder, got '{name}'" in said
    assert not place.runs()


def test_a_port_in_use(place: Place, taken: int) -> None:
    config = place.config(run={"name": "alone"})
    said = one_message(place.run("train", config, **under_torchrun(0, 1, taken)))
    assert f"port {taken}" in said
    assert f"in use by process {os.getpid()}" in said
    assert "MASTER_PORT" in said
    assert not place.runs()


def test_a_meeting_place_in_use(place: Place, taken: int) -> None:
    done = place.run(
        "train", place.config(), "--node-rank", "0", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{taken}"
    )
    assert f"port {taken} on 127.0.0.1 is in use by process {os.getpid()}" in one_message(done)


# Checkpoints


def shard(run: Path, step: int, rank: int = 0) -> Path:
    return run / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


@pytest.mark.parametrize(
    ("harm", "what"),
    [(flip, "has checksum"), pytest.param(cut, "bytes were written", marks=pytest.mark.nightly)],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    trained: Trained, place: Place, harm: Callable[[Path], None], what: str
) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    harm(shard(run, 6))
    trained.place.good("resume", run, "train.steps=7", "machines.processes=1")
    (event,) = [e for e in records(run, "event") if e["level"] == "warning"]
    for piece in ("step 6 is bad", "rank-00000.safetensors", "slice", what, "fell back to the checkpoint before it"):
        assert piece in event["message"]
    assert "the damaged one is now step-00000006.aside-0" in event["message"]
    assert [start["step"] for start in records(run, "start")] == [0, 4]
    assert losses(run).keys() == set(range(1, 8))
    trained.place.good("resume", run, "train.steps=8", "machines.processes=2")
    assert [e for e in records(run, "event") if e["level"] == "warning"] == [event], "told once"
    assert records(run, "start")[-1]["step"] == 7


@pytest.mark.nightly
def test_a_run_without_a_good_checkpoint_is_left_as_it_was(trained: Trained, place: Place) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    for step in (2, 4, 6):
        flip(shard(run, step))
    before = (run / "run.yaml").read_text(), (run / "plan.yaml").read_text()
    done = trained.place.run("resume", run, "train.steps=7", "machines.processes=1")
    said = " ".join(done.err.replace("|", " ").split())
    assert done.code == 3
    for step in (2, 4, 6):
        assert f"step {step} is bad" in said
    assert "start a new run in another folder" in said
    assert "gossamer resume" not in said, "it would end the same way"
    assert "Traceback" not in done.err
    assert ((run / "run.yaml").read_text(), (run / "plan.yaml").read_text()) == before


@pytest.mark.parametrize(
    ("override", "pieces"),
    [
        (
            "model.config.hidden_size=48",
            ("a checkpoint of another model", "float32 (257, 32), wanted float32 (257, 48)", "saved from", "a new run"),
        ),
        pytest.param(
            "train.seed=5",
            ("made with seed 0, the run has 5", "Resume with seed 0, or start a new run"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "train.batch=6",
            ("made with batch 4, the run has 6", "Resume with batch 4"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "data.sequence=16",
            ("made with sequence 32, the run has 16", "start a new run"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_is_not_resumed_with_what_would_make_it_another(
    trained: Trained, place: Place, override: str, pieces: tuple[str, ...]
) -> None:
    run = trained.copy(place.folder / "runs" / "copy")
    flip(shard(run, 6))
    before = (run / "run.yaml").read_text(), (run / "plan.yaml").read_text()
    said = one_message(trained.place.run("resume", run, override))
    for piece in ("step-00000004", *pieces):
        assert piece in said
    assert "gossamer resume" not in said
    assert ((run / "run.yaml").read_text(), (run / "plan.yaml").read_text()) == before
    assert (run / "checkpoints" / "step-00000006").is_dir(), "nothing is set aside for a run that does not begin"


def test_a_resume_on_another_text_names_the_files(trained: Trained, place: Place) -> None:
    run, corpus = trained.copy(place.folder / "runs" / "copy"), place.folder / "texts"
    shutil.copytree(trained.place.folder / "corpus", corpus)
    (corpus / "new.txt").write_text("nobody has read this")
    said = one_message(trained.place.run("resume", run, "train.steps=7", f"data.source=text:{corpus}/*.txt"))
    assert "data.source: the training text has changed since the run began: 1 file is new (new.txt)" in said
    assert "command line" in said and "start a new run" in said


# A full disk


@pytest.fixture
def small_disk(place: Place) -> Iterator[Path]:
    """Where the run `full` keeps its checkpoints: a file system that holds one of them, and not two."""
    folder = place.folder / "runs" / "full" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1100k", "gossamer-test", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.nightly
def test_a_run_whose_last_save_fails_is_not_done_though_it_trains_to_its_end(place: Place, small_disk: Path) -> None:
    # one process under a launcher: its run's folder has the name it was given
    config = place.config(run={"name": "full"}, train={"steps": 8, "keep_checkpoints": 1})
    place.good("train", config, "train.steps=2", **under_torchrun(0, 1, free_port()))
    run = place.folder / "runs" / "full"
    (small_disk / "ballast").write_bytes(b"x" * (_free(small_disk) - 100_000))
    done = place.run("resume", run, "train.steps=8")
    said = " ".join(done.err.replace("|", " ").split())
    assert (done.code, records(run, "end")[-1]["outcome"]) == (3, "failed")
    assert "trained to step 8, but the checkpoint of step 8 was not saved: the disk is full" in said
    assert "the newest checkpoint is of step 2" in said
    assert "done" not in done.out and "gossamer sample" not in done.out
    assert losses(run).keys() == set(range(1, 9))
    saved = records(run, "checkpoint")
    assert [(s["step"], bool(s["error"])) for s in saved] == [(2, False), (4, True), (6, True), (8, True), (8, True)]
    for piece in ("the disk is full", "needs", "are free", "free space"):
        assert piece in saved[1]["error"]
    assert sorted(p.name for p in small_disk.iterdir()) == ["ballast", "step-00000002"]
    assert latest_good(small_disk)[0].step == 2


@pytest.mark.nightly
def test_a_stop_whose_last_save_fails_says_so_and_is_a_failure(place: Place, small_disk: Path) -> None:
    (place.folder / "hold").write_text("3")
    train = {"steps": 400, "keep_checkpoints": 1}
    config = place.config(model={"factory": "watched:make"}, run={"name": "full"}, train=train)
    place.good("train", config, "train.steps=2", **under_torchrun(0, 1, free_port()))
    (small_disk / "ballast").write_bytes(b"x" * (_free(small_disk) - 100_000))
    run = place.folder / "runs" / "full"
    process = place.start("resume", run, "train.steps=400", "train.checkpoint_every=0", "--json")
    eventually(lambda: (place.folder / "held-0").exists() or process.poll() is not None, "it is held")
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "saving a checkpoint first" in process.stderr.readline()
    (place.folder / "hold").unlink()
    done = ended(process)
    assert done.code == 3, done.err
    (end,) = records(run, "end")[1:]
    assert end["outcome"] == "failed"
    said = " ".join(done.err.replace("|", " ").split())
    for text in (said, end["message"]):
        assert (
            f"stopped as asked after step {end['step']}, but the checkpoint of step {end['step']} was not saved" in text
        )
        for piece in ("the disk is full", "free space", "the newest checkpoint is of step 2"):
            assert piece in text
    assert "gossamer resume" in said and "with a checkpoint" not in said
    assert latest_good(small_disk)[0].step == 2


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
