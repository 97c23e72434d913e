"""When a process that hangs is asked for its stacks; that they are in its log is seen in tests/system."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.process import stack_request
from gossamer.process.stack_request import STACKS_S, StackRequest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(stack_request, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def process() -> tuple[Any, list[int]]:
    sent: list[int] = []
    return SimpleNamespace(log_bytes=7, signal=sent.append), sent


def test_all_stacks_are_asked_for_when_the_first_is_written_whole(clock: SimpleNamespace) -> None:
    worker, sent = process()
    request = StackRequest(worker)
    for written, signals in ((7, 1), (7, 1), (9, 1), (12, 1), (12, 2), (12, 2), (30, 2), (30, 2)):
        worker.log_bytes = written
        request.go_on()
        assert len(sent) == signals
    assert sent == [signal.SIGUSR1, signal.SIGUSR2]


def test_a_main_thread_that_writes_nothing_is_not_waited_for(clock: SimpleNamespace) -> None:
    worker, sent = process()
    request = StackRequest(worker)
    clock.now_s += 0.4 * STACKS_S
    request.go_on()
    assert sent == [signal.SIGUSR1] and not request.is_over
    clock.now_s += 0.2 * STACKS_S
    request.go_on()
    assert sent == [signal.SIGUSR1, signal.SIGUSR2] and not request.is_over, "they have time to be written"
    clock.now_s += 0.5 * STACKS_S
    assert request.is_over
