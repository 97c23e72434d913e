"""What ps and /proc show of a process that has become another program: its command line and its environment.

The system shows the memory in which it has put both when the interpreter was started (proc(5): cmdline, environ). What
differs is written there in place: whoever looks for ranks by their folder, or by RANK, finds copies as he finds others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOM = 1024  # bytes that a template keeps free for what is longer in a copy, in its last argument and in a variable
ROOM_VARIABLE = "GOSSAMER_ROOM"
_FIRST_FIELD = 3  # of proc(5) behind the name of the program
_ARGUMENTS, _ENVIRONMENT = 48 - _FIRST_FIELD, 50 - _FIRST_FIELD  # of the start; the end is the next field


def show(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Let this process be shown with these arguments and variables. What finds no room is left out.

    Call it when the C library has variables of its own (os.environ was cleared and filled again).
    """
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    limits = [int(field) for field in fields[_ARGUMENTS : _ENVIRONMENT + 2]]
    if len(limits) < 4 or not all(limits):  # a system that does not tell
        return
    start, end, env_start, env_end = limits
    _put(start, end - start, b"".join(os.fsencode(word) + b"\0" for word in arguments))
    _show_variables(env_start, env_end, {os.fsencode(k): os.fsencode(v) for k, v in env.items()})


def _show_variables(start: int, end: int, env: Mapping[bytes, bytes]) -> None:
    """Write the variables that differ; libraries may still read the others where they are."""
    left = {name: name + b"=" + value for name, value in env.items()}
    at, room = start, (start, 0)
    for old in ctypes.string_at(start, end - start).split(b"\0")[:-1]:
        name = old.partition(b"=")[0]
        if name == os.fsencode(ROOM_VARIABLE):
            room = (at, len(old))
        elif name in left and len(left[name]) <= len(old):
            if (new := left.pop(name)) != old:
                _put(at, len(old), new)
        else:
            _put(at, len(old), b"")
        at += len(old) + 1
    _put(*room, b"\0".join(left.values()))


def _put(at: int, size: int, data: bytes) -> None:
    """Write `data`, and zeros up to `size` bytes; more than these is left out."""
    ctypes.memset(at, 0, size)
    ctypes.memmove(at, data, min(len(data), size))
