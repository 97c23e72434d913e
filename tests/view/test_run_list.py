"""The list of runs: what is read of each, which are shown, and that lines fit the screen."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.cli import main
from gossamer.spec.errors import BadInput
from gossamer.spec.records import End, Evaluation, Length
from gossamer.view.report import write_report
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_glance import Glance, glance, glances
from gossamer.view.run_history import RunHistory
from gossamer.view.run_list import Wanted, list_text
from gossamer.view.run_lock import held, holder_of
from gossamer.view.screen import Screen
from view.streams import run, start, step


def made(folder: Path, steps: int = 100, *, ends: bool = True, at_s: float = 1000.0) -> RunDirectory:
    directory = RunDirectory(folder)
    for record in run(steps, ends=ends):
        directory.append(record)
    os.utime(directory.records_file, (at_s, at_s))
    return directory


def test_a_glance_says_what_the_whole_file_says(tmp_path: Path) -> None:
    long = made(tmp_path / "long", 400)
    found = glance(long)
    last = [record for record in long.records() if isinstance(record, Evaluation)][-1]
    assert long.records_file.stat().st_size > 2**16, "longer than the part that is read"
    assert (found.outcome, found.step, found.steps_wanted) == ("done", 400, 400)
    assert (found.validation_step, found.validation_bits_per_byte) == (last.step, last.bits_per_byte)
    assert (found.model, found.data, found.ranks) == ("llama", "stdlib", 2)


def test_a_resume_takes_back_what_it_repeats(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for record in (start(0, 10), step(1), step(2)):
        directory.append(record)
    directory.append(Evaluation(step=2, loss=1.0, bits_per_byte=2.0, sequences=1, seconds=0.1))
    directory.append(End(step=2, outcome="failed", message="a rank was lost"))
    directory.append(start(1, 10))
    found = glance(directory)
    assert (found.outcome, found.step, found.validation_step) == ("unfinished", 1, None)
    assert found.loss == step(1).loss


def test_a_cut_line_costs_itself_alone(tmp_path: Path) -> None:
    directory = made(tmp_path, 10, ends=False)
    with directory.records_file.open("a") as out:
        out.write('{"kind":"end","step":10,"outc')
    assert (glance(directory).outcome, glance(directory).step) == ("unfinished", 10)


@pytest.mark.parametrize("text", ["", "\n", '{"kind":"comet","time_s":1}\n', '{"kind":"start"}\n', "\x00\xff"])
def test_records_that_say_nothing_are_an_empty_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "records.jsonl").write_text(text)
    assert (glance(RunDirectory(tmp_path)).outcome, glance(RunDirectory(tmp_path)).step) == ("empty", 0)


def test_the_steps_of_a_run_by_time_are_those_found_last(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.append(replace(start(0, 10**6), limit_s=60.0))
    assert glance(directory).steps_wanted == 10**6
    directory.append(Length(step=1, steps=77))
    assert glance(directory).steps_wanted == 77


def test_a_run_that_is_trained_is_running_until_its_process_ends(tmp_path: Path) -> None:
    directory = made(tmp_path / "a")
    with held(directory.path):
        holder = holder_of(directory.path)
        assert holder is not None and holder.process == os.getpid()
        assert glance(directory).outcome == "running"
    assert glance(directory).outcome == "done"


def test_a_lock_of_the_dead_counts_for_nothing(tmp_path: Path) -> None:
    def left_by(**who: object) -> bool:
        said = {"host": socket.gethostname(), "process": os.getpid(), "since_s": time.time(), "token": "t", **who}
        (tmp_path / ".lock").write_text(json.dumps(said))
        return holder_of(tmp_path) is not None

    assert left_by()
    assert not left_by(process=2**22 + 1), "no process has this number"
    assert not left_by(since_s=10.0), "this process began after the lock was taken: it is another one"
    made(tmp_path, at_s=time.time())
    assert left_by(host="elsewhere")
    os.utime(tmp_path / "records.jsonl", (10.0, 10.0))
    assert not left_by(host="elsewhere")


def test_the_newest_is_first_and_other_folders_are_left_out(tmp_path: Path) -> None:
    for at, name in enumerate(["b", "c", "a"]):
        made(tmp_path / name, 2, at_s=1000.0 + at)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    assert [one.name for one in glances(tmp_path)] == ["a", "c", "b"]
    assert [one.name for one in glances(tmp_path / "b")] == ["b"], "a run itself"


def test_only_what_is_asked_for_is_listed() -> None:
    run = Glance(name="20261125-first", directory="d", outcome="done", model="Llama", data="stdlib", started_s=5000.0)
    for fits in ({}, {"outcome": "done"}, {"model": "llam"}, {"words": ["FIRST", "std"]}, {"since": "1970-01-01"}):
        assert Wanted.of(**fits).fits(run), fits  # type: ignore[arg-type]
    for differs in ({"outcome": "failed"}, {"model": "gpt"}, {"words": ["first", "other"]}, {"since": "2h"}):
        assert not Wanted.of(**differs).fits(run), differs  # type: ignore[arg-type]
    assert Wanted.of(since="2h").since_s == pytest.approx(time.time() - 7200, abs=60)


def test_unknown_outcomes_and_times_are_refused() -> None:
    with pytest.raises(BadInput, match=r"--outcome: wanted one of done, .*, got 'dnoe': did you mean 'done'"):
        Wanted.of(outcome="dnoe")
    with pytest.raises(BadInput, match=r"--since: wanted a time such as 90m.*, got 'yesterday'"):
        Wanted.of(since="yesterday")


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 120, None])
def test_lines_fit_the_screen_and_name_every_run(columns: int | None) -> None:
    runs = [
        Glance(name="20261125-130118-vera-pipe", directory="a", outcome="done", step=8, steps_wanted=8, loss=2.0),
        Glance(
            name="20261125-130119-x",
            directory="b",
            outcome="unfinished",
            step=123_456,
            steps_wanted=1_000_000,
            model="m\x1b[31m" * 20,
            data="text:\u202e" * 9,
            validation_bits_per_byte=1.25,
            started_s=0.0,
        ),
    ]
    lines = list_text(runs, Screen(columns), now_s=7200.0).splitlines()
    assert all(len(line) <= (columns or 10_000) and line.isprintable() for line in lines)
    assert sum(line.startswith("20261125-1301") for line in lines) == 2
    if columns != 20:
        assert any("1.250 bits/byte" in line for line in lines)


def test_the_command_lists_filters_and_answers_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["runs"]) == 0 and "no runs in runs" in capsys.readouterr().out
    made(tmp_path / "runs" / "first", 4)
    made(tmp_path / "runs" / "second", 4, ends=False)
    assert main(["runs", "--outcome", "unfinished"]) == 0
    out = capsys.readouterr().out
    assert "second" in out and "first" not in out
    assert main(["runs", "no-such-word"]) == 0 and "no run of the 2 in runs" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "runs"), "first", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["of"] == 2 and [one["name"] for one in data["runs"]] == ["first"]


PAGE = Path(__file__).parents[2] / "docs" / "howto" / "look_at_runs.md"
COMMANDS = re.findall(r"^gossamer .*$", PAGE.read_text("utf-8"), re.M)


def test_every_command_of_the_page_does_what_it_is_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "runs" / "20261125-140730-llama", 60, at_s=1000.0)
    made(tmp_path / "runs" / "20261125-140805-llama", 40, ends=False, at_s=2000.0)
    assert {command.split()[1] for command in COMMANDS} == {"runs", "compare", "report"}
    for command in COMMANDS:
        assert main(shlex.split(command, comments=True)[1:]) == 0, command
        assert capsys.readouterr().out
    assert (tmp_path / "report.html").is_file() and (tmp_path / "runs/20261125-140805-llama/report.md").is_file()
    assert main(["compare", "llama", "latest"]) == 2
    (refused,) = re.findall(r"^wanted one run .*$", PAGE.read_text("utf-8"), re.M)
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize("field", ["step", "steps", "loss", "wire_bytes", "time_s", "tokens", "ranks", "versions"])
@pytest.mark.parametrize("value", [None, "two", [None], {"a": None}])
def test_a_record_of_other_types_costs_itself_alone(tmp_path: Path, field: str, value: object) -> None:
    """JSON that is whole and yet no record: one such line must not end the list of all runs, nor a report."""
    directory = made(tmp_path / "odd", 20)
    whole = [json.loads(line) for line in directory.records_file.read_text().splitlines()]
    with directory.records_file.open("a") as file:
        file.writelines(json.dumps(one | {field: value}) + "\n" for one in whole if field in one)
    (found,) = glances(tmp_path)
    assert found.step == 20 and found.loss is not None
    history = RunHistory.read(directory)
    assert history.steps[-1].step == 20 and write_report(history, tmp_path / "report.html").html_bytes
