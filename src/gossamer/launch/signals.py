"""Count the stop signals that a supervisor receives; the previous handlers are restored afterwards."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from gossamer.process.event_loop import EventLoop

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def nothing_to_stop() -> Iterator[None]:
    """Ignore stop signals while entered, as only cleanup is left; a second SIGINT raises KeyboardInterrupt."""
    with noted_stops():
        yield


@contextmanager
def noted_stops() -> Iterator[Callable[[], bool]]:
    """Note stop signals while entered; yield whether there was one. A second SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    heard: list[int] = []

    def asked(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if heard.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, asked) for number in _ASKING}
    try:
        yield lambda: bool(heard)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequests:
    """A counter of stop signals: while entered, SIGINT, SIGTERM and SIGHUP add to `count` and do not end the process.

    Signals that were ignored before (nohup) stay ignored. In a thread other than the main one Python delivers no
    signals: there `count` stays 0.
    """

    def __init__(self, loop: EventLoop) -> None:
        self.count = 0
        self._loop = loop
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._is_main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopRequests:
        if self._is_main:
            self._woken, self._wake = socket.socketpair()
            self._woken.setblocking(False)
            self._wake.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            self._loop.watch(self._woken, self._drain)
            for number in _ASKING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup and background jobs keep their say
                    self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._is_main:
            signal.set_wakeup_fd(self._wakeup_before)
            self._loop.forget(self._woken)
            self._woken.close()
            self._wake.close()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def _drain(self) -> None:
        self._woken.recv(4096)
