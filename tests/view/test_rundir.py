"""Run directories: what is written can be read, whatever happened in between."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.spec.records import End, Event, Record, Step
from gossamer.view.run_directory import RunDirectory, check_new, latest, open_run
from view.streams import run, start, step


def told(records: list[Record]) -> list[str]:
    return [record.line() for record in records]


def test_records_come_back_in_order(tmp_path: Path) -> None:
    directory, records = RunDirectory(tmp_path / "run"), list(run(20))
    for record in records:
        directory.append(record)
    assert told(list(directory.records())) == told(records)


def test_a_torn_last_line_costs_itself_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.append(start())
    directory.append(step(1))
    with directory.records_file.open("a") as out:
        out.write(step(2).line()[:40])
    assert told(list(directory.records())) == told([start(), step(1)])
    directory.append(step(3))  # after a resume
    assert told(list(directory.records())) == told([start(), step(1), step(3)])


def test_lines_of_another_version_are_passed_over(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.records_file.write_text('{"kind":"weather","time_s":1}\nnull\n12\n\n[]\n')
    directory.append(start())
    assert told(list(directory.records())) == told([start()])


def test_no_records_is_an_empty_run(tmp_path: Path) -> None:
    assert list(RunDirectory(tmp_path / "none").records()) == []


def test_names_are_stamped_and_never_shared(tmp_path: Path) -> None:
    made = [RunDirectory.create(tmp_path / "runs", "my model/7B", now=0.0) for _ in range(3)]
    names = [directory.name for directory in made]
    assert names[0].endswith("-my-model-7B") and len(names[0]) == len("YYYYMMDD-HHMMSS-my-model-7B")
    assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]
    assert all(directory.path.is_dir() for directory in made)


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "../../etc")
    assert directory.path.parent == tmp_path / "runs"


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a/", "/etc", "a\\b", "a\0"])
def test_a_whole_name_is_that_of_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"run\.name: wanted the name of one folder, got '.*write a name without / and"):
        RunDirectory.named(tmp_path, name)
    assert RunDirectory.named(tmp_path, "..a b").path == tmp_path / "..a b"


@pytest.mark.parametrize("there", ["run.yaml", "records.jsonl", "checkpoints/step-4/x", "phases/1/records.jsonl"])
def test_a_run_is_not_trained_over(tmp_path: Path, there: str) -> None:
    directory = RunDirectory(tmp_path / "a")
    check_new(directory, resume="--resume auto")
    for name, is_run in (("out.log", False), (there, True)):
        file = directory.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        if is_run:
            with pytest.raises(
                BadInput, match=r"wanted a new run, or --resume auto, got .*/a, which is there already:"
            ):
                check_new(directory, resume="--resume auto")
        else:
            check_new(directory, resume="--resume auto")


def test_runs_where_a_file_stands_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadInput, match=r"run\.directory.*wanted a folder for runs"):
        RunDirectory.create(tmp_path / "runs", "x")


def test_latest_is_the_one_written_to_last(tmp_path: Path) -> None:
    for at, name in enumerate(["b", "a", "c"]):
        directory = RunDirectory(tmp_path / name)
        directory.append(start())
        os.utime(directory.records_file, (100 + at % 2, 100 + at % 2))
    (tmp_path / "z").mkdir()  # no run
    assert latest(tmp_path).name == "a"
    directory = RunDirectory(tmp_path / "c")
    directory.append(step(1))
    assert latest(tmp_path).name == "c"


def test_latest_of_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"wanted a run under .*, got none: start one"):
        latest(tmp_path)


def test_open_run_refuses_what_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a folder without records\.jsonl"):
        open_run(tmp_path)
    with pytest.raises(BadInput, match="no such folder"):
        open_run(tmp_path / "none")


def test_configuration_and_plan_come_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    config = RunConfig.model_validate({"model": {"hf": "llama"}, "train": {"steps": 7}})
    plan = Plan(rows=(8,), microbatches=(2,))
    directory.keep(config, {"train.steps": "run.yaml:3"})
    directory.keep_plan(plan)
    assert directory.config() == config
    assert directory.plan() == plan
    assert directory.provenance() == {"train.steps": "run.yaml:3"}
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "began.json",
        "plan.yaml",
        "provenance.json",
        "run.yaml",
    ]


def test_a_damaged_configuration_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{a: [")
    with pytest.raises(BadInput, match=r"a readable run\.yaml"):
        RunDirectory(tmp_path).config()


def test_tail_hands_over_each_line_once_and_only_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    tail = directory.tail()
    assert tail.read() == []
    directory.append(start())
    assert told(tail.read()) == told([start()])
    line = step(1).line() + "\n"
    for part in (line[:50], line[50:]):
        assert tail.read() == []
        with directory.records_file.open("a") as out:
            out.write(part)
    assert told(tail.read()) == told([step(1)])
    directory.append(step(2))
    tail.skip()
    assert tail.read() == []


def test_a_tail_of_what_cannot_be_read_has_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run.append(Event(level="info", message="a"))
    tail = run.tail()

    def fail(*args: object, **rest: object) -> None:
        raise PermissionError("a share that went away")

    with monkeypatch.context() as context:
        context.setattr(Path, "open", fail)
        assert tail.read() == []
    assert len(tail.read()) == 1, "once it can be read again"
    with run.records_file.open("a") as out:
        out.write('{"kind": ["odd"]}\n')
    assert tail.read() == []


def test_follow_waits_for_news_and_stops_at_the_end(tmp_path: Path) -> None:
    directory, records = RunDirectory(tmp_path), list(run(5))
    waiting = iter(records)

    def writer_works(seconds: float) -> None:
        assert seconds == 0.1
        directory.append(next(waiting))

    seen = list(directory.follow(poll_s=0.1, sleep=writer_works))
    assert told(seen) == told(records)
    assert isinstance(seen[-1], End)


def test_follow_stops_when_told_and_loses_nothing(tmp_path: Path) -> None:
    directory, writer_lives = RunDirectory(tmp_path), True

    def last_words(_: float) -> None:
        nonlocal writer_lives
        directory.append(step(1))
        writer_lives = False

    seen = list(directory.follow(sleep=last_words, stop=lambda: not writer_lives))
    assert [type(record) for record in seen] == [Step]


def test_every_line_is_json_by_itself(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for record in run(100):
        directory.append(record)
    kinds = {json.loads(line)["kind"] for line in directory.records_file.read_text().splitlines()}
    assert kinds == {"start", "step", "evaluation", "checkpoint", "event", "sample", "end"}
