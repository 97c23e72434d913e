"""Measure the link from this machine to a host over ssh, before anything is started there.

The host's Python answers one byte to every block that it has read. Blocks grow until one takes long enough. What ssh
itself can encrypt (some hundred megabytes a second) is the fastest that is seen: a link that matters is slower.
"""

from __future__ import annotations

import shlex
import struct
import subprocess
import time
from dataclasses import dataclass

from gossamer.launch.preflight import SSH
from gossamer.process import tied

_READER = """
import struct, sys
take, give = sys.stdin.buffer, sys.stdout.buffer
while len(head := take.read(8)) == 8:
    left = struct.unpack("<q", head)[0]
    while left:
        left -= len(take.read(min(left, 65536))) or left
    give.write(b"."); give.flush()
"""
_LONG_ENOUGH_S, _FIRST, _LARGEST = 0.5, 1 << 16, 1 << 24


@dataclass(frozen=True, slots=True)
class SshLink:
    """The link to a host: seconds of a round trip, and bytes/s from here to there."""

    round_trip_s: float
    bytes_per_s: float


def measure_link(host: str, python: str) -> SshLink | None:
    """Return the link to `host`, where `python` is an interpreter; None where it cannot be measured."""
    command = tied([*SSH, host, shlex.join([python, "-c", _READER])])
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as reader:
            try:
                return _measured(reader)
            finally:
                reader.kill()
    except OSError:
        return None


def _measured(reader: subprocess.Popen[bytes]) -> SshLink | None:
    if _seconds(reader, 1) is None:  # the interpreter starts
        return None
    trips = [_seconds(reader, 1) for _ in range(3)]
    known = [seconds for seconds in trips if seconds is not None]
    if not known:
        return None
    round_trip_s, size = min(known), _FIRST
    while True:
        taken_s = _seconds(reader, size)
        if taken_s is None:
            return None
        if taken_s >= _LONG_ENOUGH_S or size >= _LARGEST:
            return SshLink(round_trip_s, size / max(1e-6, taken_s - round_trip_s))
        size *= 4


def _seconds(reader: subprocess.Popen[bytes], size: int) -> float | None:
    """Return the seconds until the host has read so many bytes; None where it does not answer."""
    assert reader.stdin is not None and reader.stdout is not None
    began_s = time.monotonic()
    try:
        reader.stdin.write(struct.pack("<q", size) + bytes(size))
        reader.stdin.flush()
    except OSError:
        return None
    return time.monotonic() - began_s if reader.stdout.read(1) == b"." else None
