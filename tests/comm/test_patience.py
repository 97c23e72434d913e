"""What never answers is not waited for: the store of a process that has stopped, as that of a host that is cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from gossamer.comm import patience
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.channel.store import join_store
from gossamer.comm.message import ProcessGroups
from gossamer.comm.patience import NoAnswer, PatientStore, answered
from gossamer.spec.errors import PeerLost

KEEPER = """
import sys, time
from gossamer.comm.channel.store import join_store
store = join_store("127.0.0.1", 0, 2, is_keeper=True, timeout_s=60.0)
store.set("here", "1")
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def store_and_stop() -> Iterator[tuple[dist.Store, Callable[[], None]]]:
    """A store that another process keeps, and what stops that process. Its kernel still acknowledges what arrives."""
    paths = [entry for entry in sys.path if Path(entry).joinpath("gossamer").is_dir()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert keeper.stdout is not None
        store = join_store("127.0.0.1", int(keeper.stdout.readline()), 2, is_keeper=False, timeout_s=60.0)
        yield store, lambda: stopped(keeper)
    finally:
        keeper.kill()
        keeper.wait()
        ended()


def stopped(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until all of its threads have: one of them might still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def ended() -> None:
    """Wait for the threads that were left behind, which the end of the keeper ends."""
    for thread in threading.enumerate():
        if thread.name == "gossamer-asks":
            thread.join(60.0)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "GRACE_S", 2.0)


def test_what_is_answered_is_returned_or_raised() -> None:
    assert answered(lambda: 7, 60.0, "it") == 7
    with pytest.raises(ValueError, match="no such key"):
        answered(lambda: (_ for _ in ()).throw(ValueError("no such key")), 60.0, "it")


def test_at_the_end_of_the_interpreter_it_is_asked_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on no thread begins there; a loop's last word is said there."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert answered(lambda: 7, 60.0, "it") == 7


def test_what_does_not_answer_is_named() -> None:
    is_over = threading.Event()
    with pytest.raises(NoAnswer, match=r"no answer of the store within 0\.1 s"):
        answered(lambda: is_over.wait(60.0), 0.1, "the store")
    is_over.set()
    ended()


def test_a_store_that_stops_fails_every_operation_and_the_next_at_once(
    store_and_stop: tuple[dist.Store, Callable[[], None]],
) -> None:
    store, stop = store_and_stop
    keys = PatientStore(store, 0.5)
    assert keys.get("here") == b"1" and keys.check(["here"]) and not keys.check(["there"])
    assert (keys.add("count", 2), keys.add("count", 3)) == (2, 5)
    keys.under("a").set("b", b"\x00\xff")
    assert keys.get("a/b") == b"\x00\xff"
    with pytest.raises(RuntimeError, match="there"):  # torch's own: nobody writes it
        keys.wait(["there"])
    stop()
    with pytest.raises(NoAnswer, match=r"no answer of the store of the ranks within 2\.5 s"):
        keys.wait(["there"])
    for operation in (lambda: keys.check(["here"]), lambda: keys.get("here"), lambda: keys.set("here", "2")):
        with pytest.raises(NoAnswer, match="timed out: the store of the ranks does not answer"):
            operation()
    with pytest.raises(NoAnswer, match="does not answer"):  # it is one store
        keys.under("a").get("b")


def test_who_leaves_does_not_wait_long(store_and_stop: tuple[dist.Store, Callable[[], None]]) -> None:
    store, stop = store_and_stop
    keys = PatientStore(store, 600.0)
    below = keys.under("a")
    keys.hurry(0.5)
    stop()
    with pytest.raises(NoAnswer, match=r"within 2\.5 s"):
        below.check(["left"])


def test_ranks_do_not_wait_for_ever_to_join_a_group(
    store_and_stop: tuple[dist.Store, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own limit is over after 0.5 s; it says so to the store, and waits for its answer."""
    store, stop = store_and_stop
    monkeypatch.setattr("gossamer.comm.channel.group.GRACE_S", 0.5)
    stop()
    said = r"rank 1 could not join the process group 'all' of 2 ranks over gloo within 0\.5 s: timed out: no answer"
    with pytest.raises(PeerLost, match=said):
        ProcessGroupChannel(Rendezvous(store=store, rank=1, levels=ProcessGroups.flat(2), timeout_s=0.5))


def test_a_store_that_stopped_is_not_waited_for_by_who_comes_later(
    store_and_stop: tuple[dist.Store, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stop = store_and_stop
    monkeypatch.setattr("gossamer.comm.channel.store.GRACE_S", 0.5)
    stop()
    with pytest.raises(NoAnswer, match="no answer of the store at"):
        join_store("127.0.0.1", store.port, 2, is_keeper=False, timeout_s=0.5)
