"""The address of a teacher on another host."""

from __future__ import annotations

import re

from gossamer.spec.errors import bad_input

_ELSEWHERE = "tcp://"


def address_of(teacher: str, *, key: str = "teacher") -> tuple[str, int] | None:
    """Return host and port of a teacher on another host, tcp://HOST:PORT; None for the path of one.

    Raises BadInput, with `key`.
    """
    if not teacher.strip().startswith(_ELSEWHERE):
        return None
    match = re.fullmatch(r"([^:/@\s]+):(\d{1,5})", teacher.strip().removeprefix(_ELSEWHERE))
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        do = "write the address that `gossamer teach` listens on"
        raise bad_input(wanted="tcp://HOST:PORT such as tcp://10.0.0.1:29600", got=teacher, do=do, key=key)
    return match.group(1), int(match.group(2))
