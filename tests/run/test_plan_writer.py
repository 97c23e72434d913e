"""plan.yaml while a run trains: a disk that is full keeps no rank from training, and no rank from saying so."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from gossamer.job.plan_writer import PlanWriter
from gossamer.spec import records
from gossamer.spec.plan import Plan
from gossamer.view.run_directory import RunDirectory

FIRST, SECOND = (Plan(rows=(1,), microbatches=(1,), exchange=one) for one in ("dense", "star"))


def writer(path: Path, told: list[records.Record], *, rank: int = 0, is_writer: bool = True) -> PlanWriter:
    return PlanWriter(directory=RunDirectory(path / "run"), rank=rank, is_writer=is_writer, sink=told.append)


def test_one_rank_of_a_directory_writes(tmp_path: Path) -> None:
    one = writer(tmp_path, [], is_writer=False)
    one.keep(FIRST)
    one.keep_unwritten()
    assert not (tmp_path / "run").exists()


def test_a_plan_without_room_is_written_before_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another host's rank the log says it, as rank 0 alone writes records."""
    full, write = [False], RunDirectory.keep_plan

    def keep_plan(directory: RunDirectory, plan: Plan) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(directory, plan)

    monkeypatch.setattr(RunDirectory, "keep_plan", keep_plan)
    told = list[records.Record]()
    one = writer(tmp_path, told, rank=2)
    one.keep(FIRST)
    one.keep_unwritten()
    assert one.directory.plan() == FIRST and told == []
    full[0] = True
    with caplog.at_level(logging.WARNING):
        one.keep(SECOND)
        one.keep_unwritten()
    assert one.directory.plan() == FIRST
    (warning,) = told
    assert isinstance(warning, records.Event) and (warning.level, warning.rank) == ("warning", 2)
    assert [record.message for record in caplog.records] == [warning.message]
    full[0] = False
    one.keep_unwritten()
    one.keep_unwritten()
    assert one.directory.plan() == SECOND and len(told) == 2
