"""A worker's output goes on where its log cannot take it."""

from __future__ import annotations

import os
from io import BytesIO

from gossamer.process.event_loop import EventLoop
from gossamer.process.tee import Tee


class Full(BytesIO):
    """A file on a disk that is full from its second line on."""

    def flush(self) -> None:
        if len(self.getvalue()) > 6:
            raise OSError(28, "No space left on device")


def test_a_full_disk_takes_no_log_and_ends_nothing() -> None:
    read, write = os.pipe()
    there, onward = os.pipe()
    log = Full()
    with os.fdopen(read, "rb", buffering=0) as source:
        loop = EventLoop()
        tee = Tee(loop, source, log=log, onward=onward)
        for line in (b"first\n", b"second\n", b"third\n"):
            os.write(write, line)
            loop.turn(1.0)
        os.close(write)
        tee.close()
    os.close(onward)
    with os.fdopen(there, "rb") as seen:
        assert seen.read() == b"first\nsecond\nthird\n"
    assert log.getvalue().startswith(b"first\n")
