"""The error report of a failing worker for its supervisor: errors/rank-00003.json, written atomically."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from gossamer.process.json_lines import LIMIT_BYTES, Said, as_unicode, read_line, write_line
from gossamer.process.stack_position import place_of
from gossamer.spec.errors import BadInput, RunFailed, WireMismatch

_MESSAGE_CHARACTERS = 4000
_TRACE_CHARACTERS = 60_000


class ErrorReport(Said):
    """The error of one worker: exception, place in the user's code, traceback."""

    rank: int
    pid: int
    kind: Annotated[str, Field(max_length=200)]  # class of the exception
    message: Annotated[str, Field(max_length=_MESSAGE_CHARACTERS)]
    place: Annotated[str, Field(max_length=_MESSAGE_CHARACTERS)] = ""  # in the user's code, "" for none
    trace: Annotated[str, Field(max_length=_TRACE_CHARACTERS)] = ""


_REPORT = TypeAdapter(ErrorReport)


def error_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's error report."""
    return folder / f"rank-{rank:05d}.json"


def write_error(folder: Path, rank: int, error: BaseException) -> Path:
    """Write the report of `error` and return its path. Raises OSError when the disk does not take it."""
    folder.mkdir(parents=True, exist_ok=True)
    place = "" if isinstance(error, (BadInput, RunFailed)) else place_of(error)  # ours say where by themselves
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    report = ErrorReport(
        rank=rank,
        pid=os.getpid(),
        kind=type(error).__name__[:200],
        message=as_unicode(str(error))[:_MESSAGE_CHARACTERS],
        place=as_unicode(place)[-_MESSAGE_CHARACTERS:],
        trace=as_unicode(trace)[-_TRACE_CHARACTERS:],
    )
    path = error_path(folder, rank)
    beside = path.with_suffix(f".{os.getpid()}.part")
    beside.write_bytes(write_line(report))
    beside.replace(path)
    return path


def read_error(folder: Path, rank: int, *, pid: int) -> ErrorReport | None:
    """Return the report of process `pid`, None when it wrote none (an older process's report does not count)."""
    try:
        with error_path(folder, rank).open("rb") as file:
            report = read_line(file.read(LIMIT_BYTES), _REPORT)
    except (OSError, WireMismatch):
        return None
    return report if report.pid == pid else None
