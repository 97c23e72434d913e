"""The stack position of a process: its innermost line of the user's code, and whether it waits for other ranks."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

_COMM = str(Path(__file__).parents[1] / "comm") + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_TORCH = ("torch", "functorch", "torchgen")
_PUMP, _OWN_THREADS = "gossamer-pump", "gossamer-"
_LOOK = threading.RLock()  # held by who looks at frames, and where nobody may


class Code(Enum):
    """The origin of a line of code: Gossamer, torch or Python; another installed package; the user."""

    OURS = 0  # also torch's and Python's
    INSTALLED = 1  # another package's
    USERS = 2


@dataclass(frozen=True, slots=True)
class StackPosition:
    """The activity of a process. `waits`: it can do nothing until another rank does something.

    `place`: the innermost line of the user's code on its main thread's stack, such as "net.py:12 in forward", "" for
    none.
    """

    waits: bool
    place: str


def stand() -> StackPosition:
    """Return the stack position of this process now; takes some ten microseconds.

    Call it from a thread that does no training, such as the heartbeat's. Nothing is known of what is `unwatched`.
    """
    if not _LOOK.acquire(blocking=False):
        return StackPosition(waits=False, place="")
    try:
        return _stand()
    finally:
        _LOOK.release()


@contextmanager
def unwatched() -> Iterator[None]:
    """Keep other threads from looking at frames in this context: a frame that is looked at keeps its variables alive
    for a moment longer, and who counts what is alive would count these.
    """
    with _LOOK:
        yield


def _stand() -> StackPosition:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    waits = computes = False
    for ident, frame in frames.items():
        name = names.get(ident, "")
        is_waiting = _is_on_the_wire(frame)
        if name.startswith(_PUMP):
            computes |= not is_waiting  # it computes the message
        elif not name.startswith(_OWN_THREADS):
            waits |= is_waiting  # backward on an accelerator has a thread of its own
    main = frames.get(threading.main_thread().ident or 0)
    return StackPosition(waits and not computes, _told(_lines(main)) if main else "")


def place_of(error: BaseException) -> str:
    """Return the place where an error was raised: the innermost line of the user's code in its traceback.

    Without one it is that of an installed package other than torch, "" where there is neither. An error raised for
    another error has the place of the original.
    """
    seen: set[int] = set()
    found = ""
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        found = _told(_raised(one)) or found
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return found


def _is_on_the_wire(frame: FrameType) -> bool:
    """Return whether the innermost line outside Python's own library is in code that waits for messages."""
    line: FrameType | None = frame
    while line is not None and _is_pythons(line.f_code.co_filename):
        line = line.f_back
    file = line.f_code.co_filename if line is not None else ""
    return file.startswith(_COMM)


def _lines(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Innermost first."""
    while frame is not None:
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _raised(error: BaseException) -> list[tuple[CodeType, int]]:
    """Innermost first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return found[::-1]


def _told(lines: Iterable[tuple[CodeType, int]]) -> str:
    installed = ""
    for code, number in lines:
        whose = _whose(code.co_filename)
        if whose is Code.OURS or (whose is Code.INSTALLED and installed):
            continue
        said = f"{_shown(code.co_filename)}:{number} in {code.co_name}"
        if whose is Code.USERS:
            return said
        installed = said
    return installed


@cache
def _whose(file: str) -> Code:
    if file.startswith(_OURS) or _is_pythons(file):
        return Code.OURS
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch and file.startswith(str(Path(torch).parent) + os.sep):
        return Code.OURS
    parts = Path(file).parts
    for folder in _INSTALLED:
        if folder in parts[:-1]:
            return Code.OURS if parts[parts.index(folder) + 1] in _TORCH else Code.INSTALLED
    return Code.USERS


@cache
def _is_pythons(file: str) -> bool:
    if file.startswith("<"):
        return True
    if any(folder in Path(file).parts for folder in _INSTALLED):
        return False
    return any(file.startswith(sysconfig.get_path(name) + os.sep) for name in ("stdlib", "platstdlib"))


def _shown(file: str) -> str:
    """From the working directory, where it lies in that."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
