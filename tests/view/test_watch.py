"""What `gossamer watch` reads of a run, and the lines it makes of it, without a terminal."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.spec.config import RunConfig
from gossamer.spec.cost import Cost
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import MeshSizes, Plan
from gossamer.spec.records import End, Event, Islands, Record
from gossamer.view.run_directory import RunDirectory
from gossamer.view.watch.canvas import ASCII, UNICODE, Canvas, Column, Glyphs, table
from gossamer.view.watch.liveness import RunState
from gossamer.view.watch.panes import PANES, head, tabs
from gossamer.view.watch.run_choice import choose_run
from gossamer.view.watch.watched_run import WatchedRun
from view.streams import run, start, step

NOW_S = 1000.0
PLAN = Plan(
    mesh=MeshSizes(replica=2),
    batch_fractions=(0.5, 0.5),
    rows=(16, 16),
    microbatches=(1, 1),
    reasons={"exchange": "all-reduce: every process is on this machine, and so on for many words until the line ends"},
    forecast=Cost(
        step_s=0.4,
        compute_s=0.46,
        wire_bytes={"0>1": 12_600_000},
        state_bytes=(2**20, 2**21),
        sent_bytes=(12_600_000, 99),
    ),
)


def written(folder: Path, records: Iterable[Record], *, plan: Plan | None = None) -> RunDirectory:
    directory = RunDirectory(folder)
    for record in records:
        directory.append(record)
    if plan is not None:
        directory.keep_plan(plan)
    return directory


def watched(folder: Path, records: Iterable[Record], *, plan: Plan | None = None) -> WatchedRun:
    found = WatchedRun(written(folder, records, plan=plan))
    found.read(NOW_S)
    return found


def state(found: WatchedRun, now_s: float) -> RunState:
    found.read(now_s)
    return found.state


def lines(pane: str, found: WatchedRun, width: int = 80, glyphs: Glyphs = UNICODE) -> list[str]:
    canvas = Canvas(width, glyphs)
    return [line.plain for one in PANES if one.name == pane for line in one.lines(found, canvas)]


def held_by(directory: RunDirectory, process: int, *, host: str = socket.gethostname(), since_s: float = 0.0) -> None:
    said = {"host": host, "process": process, "since_s": since_s, "token": "t"}
    (directory.path / ".lock").write_text(json.dumps(said))


def gone() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("until", [0, 1, 2, 137, 200])
def test_every_line_fits(tmp_path: Path, width: int, until: int, glyphs: Glyphs) -> None:
    found = watched(tmp_path, run(until=until, ends=until == 200), plan=PLAN)
    found.directory.log_file(1).parent.mkdir()
    found.directory.log_file(1).write_text(
        "a line that is longer than most terminals are wide: " + "\u6f22\u5b57 " * 40
    )
    canvas = Canvas(width, glyphs)
    shown = [*head(found, canvas, now_s=1e3), tabs(1, canvas), *(x for p in PANES for x in p.lines(found, canvas))]
    assert max(line.cell_len for line in shown) <= width
    assert glyphs is UNICODE or all(line.plain.isascii() for line in shown)


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    found = watched(tmp_path, run(until=20, ends=False))
    assert not found.read(NOW_S)
    written(tmp_path, [step(21)])
    assert found.read(NOW_S) and found.progress.steps_done == 21
    (tmp_path / "records.jsonl").write_bytes((tmp_path / "records.jsonl").read_bytes() + b'{"kind":"st')
    assert not found.read(NOW_S)  # its writer is in the middle of a line


def test_a_long_run_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.view.watch.watched_run.BLOCK_BYTES", 2000)
    found = watched(tmp_path, run(200))
    assert found.is_behind and found.progress.steps_done < 10
    reads = 0
    while found.is_behind:
        reads += found.read(NOW_S)
    assert reads > 20 and found.progress.steps_done == 200


def test_states(tmp_path: Path) -> None:
    fresh = WatchedRun(RunDirectory(tmp_path / "new"))
    assert state(fresh, 0.0).word == "gone"
    fresh.directory.path.mkdir()
    assert state(fresh, 0.0).word == "empty"
    held_by(fresh.directory, os.getpid(), since_s=2e9)
    assert state(fresh, 0.0).word == "starting"
    going = watched(tmp_path / "new", run(until=9, ends=False))
    held_by(going.directory, os.getpid(), since_s=2e9)
    assert state(going, 9.0).word == "starting"  # it resumes: the records are of an earlier start
    written(tmp_path / "new", [start(9, time_s=2e9 + 1)])
    going.read(NOW_S)
    assert state(going, 2e9 + 2).word == "running"


def test_a_run_whose_process_is_gone_has_crashed(tmp_path: Path) -> None:
    found = watched(tmp_path, run(until=9, ends=False))
    assert state(found, 5.0).word == "running"  # no lock any more, and its last record is of now
    assert state(found, 1e3).word == "crashed"
    pid = gone()
    held_by(found.directory, pid)
    assert f"process {pid} on host {socket.gethostname()} is gone, and no end was recorded" in state(found, 5.0).why
    assert lines("Run", found)[3].startswith("crashed: process")


def test_a_later_process_of_the_same_number_does_not_run_it(tmp_path: Path) -> None:
    found = watched(tmp_path, run(until=9, ends=False))
    held_by(found.directory, os.getpid(), since_s=1.0)  # 1970
    assert state(found, 5.0).word == "crashed"


def test_a_process_of_another_host_cannot_be_seen(tmp_path: Path) -> None:
    found = watched(tmp_path, run(until=9, ends=False))
    held_by(found.directory, 1, host="elsewhere.example")
    assert state(found, 60.0).word == "running"
    assert state(found, 6000.0).word == "silent"


def test_an_end_is_told_with_its_reason(tmp_path: Path) -> None:
    ended = End(time_s=9.0, step=9, outcome="failed", message="rank 1 ran out of memory", seconds=9.0)
    found = watched(tmp_path, [*run(until=9, ends=False), ended])
    assert state(found, 1e3).word == "failed"
    assert "failed: rank 1 ran out of memory" in lines("Run", found)
    written(tmp_path, [start(5, time_s=20.0), step(6, time_s=20.5)])
    held_by(found.directory, os.getpid(), since_s=2e9)
    found.read(NOW_S)
    assert found.progress.steps_done == 6 and found.progress.losses.xs[-1] == 6  # it follows the resumed run


def test_ranks_have_hosts_where_the_start_says_them(tmp_path: Path) -> None:
    found = watched(tmp_path / "a", [replace(start(), hosts=(0, 1))], plan=PLAN)
    assert lines("Ranks", found)[:4] == [
        "2 ranks on 2 hosts",
        "rank  host  part       rows  memory    sends",
        "   0     0  replica 0    16   1 MiB  12.6 MB",
        "   1     1  replica 1    16   2 MiB     99 B",
    ]
    assert lines("Ranks", watched(tmp_path / "b", [start()]))[0] == "2 ranks; hosts are not in the records"


def test_ranks_show_what_their_replica_group_and_their_log_say(tmp_path: Path) -> None:
    heard = Islands(step=4, losses=(1.5, 2.25), weights=(1.0, 1.0), rejected=(0, 3))
    found = watched(tmp_path, [start(), step(4), heard], plan=PLAN.model_copy(update={"islands": ((0,), (1,))}))
    found.directory.log_file(1).parent.mkdir()
    found.directory.log_file(1).write_text("first\n\x1b[31mcuda is not there\x1b[0m\n")
    shown = lines("Ranks", found, 120)
    assert "1.500" in shown[2] and shown[2].endswith("-")
    assert "2.250 (3 rejected)" in shown[3] and shown[3].endswith("cuda is not there")
    assert lines("Logs", found)[:3] == ["rank 1  logs/rank-00001.log", "  first", "  cuda is not there"]
    assert lines("Logs", found)[3] == "nothing in the log of rank 0"


def test_links_have_what_was_sent_and_what_was_forecast(tmp_path: Path) -> None:
    found = watched(tmp_path, run(until=10, ends=False), plan=PLAN)
    assert lines("Links", found)[:3] == [
        "link   a step         rate  forecast   in all",
        "0>1   12.6 MB   202 Mbit/s   12.6 MB   126 MB",
        "0>2   2.05 kB  32.8 kbit/s         -  20.5 kB",
    ]


def test_the_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    shown = lines("Forecast", watched(tmp_path, run(until=10, ends=False), plan=PLAN))
    assert shown[1].split() == ["step", "400", "ms", "500", "ms", "+25%"]
    assert shown[2].split() == ["computing", "460", "ms", "460", "ms", "+0%"]
    assert " ".join(shown).endswith("and so on for many words   until the line ends")  # not cut


def test_a_plan_of_a_newer_version_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("format: 99\n")
    found = watched(tmp_path, run(until=3, ends=False))
    assert "plan.yaml" in " ".join(lines("Forecast", found)) and "is no plan" in " ".join(lines("Run", found, 200))


def test_events_are_told_whole(tmp_path: Path) -> None:
    said = "the link to rank 3 has become slower than it was when the run was planned, and the plan is made again"
    event = Event(time_s=1.0, level="warning", message=said, step=7, rank=3)
    shown = lines("Events", watched(tmp_path, [start(), event]), 40)
    assert " ".join(" ".join(shown).split()).endswith(f"! warning step 7, rank 3: {said}")


def test_a_table_leaves_out_what_is_needed_least() -> None:
    columns = [
        Column("a", ["1"], 9),
        Column("bbbb", ["2"], 1),
        Column("c", ["3"], 5),
        Column("said", ["words"], 2, True),
    ]
    assert table(columns, Canvas(40))[1].plain == "1     2  3  words"
    assert table(columns, Canvas(13))[1].plain == "1  3  words"


def test_the_run_that_is_meant(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(BadInput, match="wanted a run under"):
        choose_run("", runs)
    old, new = (written(runs / name, run(3)) for name in ("20260101-llama", "20260102-gpt"))
    os.utime(old.records_file, (1.0, 1.0))
    assert choose_run("", runs).path == choose_run("latest", runs).path == new.path
    assert choose_run("llama", runs).path == choose_run(str(old.path), runs).path == old.path
    assert choose_run(str(runs), tmp_path / "none").path == new.path
    held_by(old, os.getpid(), since_s=2e9)
    assert choose_run("", runs).path == old.path  # the one that is under way
    (runs / "just made").mkdir()
    assert choose_run("just made", runs).path == runs / "just made"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2026", "got 2: 20260102-gpt, 20260101-llama: write more of the name"),
        ("no", "no such folder"),
        ("other", "other things in it"),
    ],
)
def test_a_run_that_is_none(tmp_path: Path, name: str, said: str) -> None:
    for one in ("20260101-llama", "20260102-gpt"):
        written(tmp_path / one, run(3))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(BadInput, match=said):
        choose_run(name, tmp_path)


def test_nothing_is_written_to_the_run(tmp_path: Path) -> None:
    found = watched(tmp_path, run(20), plan=PLAN)
    found.directory.keep(RunConfig(), {})
    before = {file: file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*"))}
    choose_run(str(tmp_path), tmp_path)
    found.read(NOW_S)
    for pane in PANES:
        lines(pane.name, found)
    assert before == {file: file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("*"))}
