"""The place of an error in the user's code, and whether a process waits for others, seen from its frames."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch

import gossamer
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import Collective, Message
from gossamer.process import stack_position
from gossamer.process.stack_position import place_of, stand

USERS = """
def forward(x):
    return x @ x.new_zeros(7)

def chained(x):
    try:
        forward(x)
    except RuntimeError as error:
        raise KeyError("of ours") from error

def leaves():
    raise SystemExit(5)
"""


def users(tmp_path: Path, name: str = "net.py") -> types.ModuleType:
    file = tmp_path / name
    module = types.ModuleType("net")
    exec(compile(USERS, str(file), "exec"), module.__dict__)
    return module


def caught(act, *given) -> BaseException:  # type: ignore[no-untyped-def]
    try:
        act(*given)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_line_of_the_user_s(tmp_path: Path, monkeypatch) -> None:
    net, x = users(tmp_path), torch.zeros(3, 3)
    assert place_of(caught(net.forward, x)) == f"{tmp_path}/net.py:3 in forward"
    assert place_of(caught(net.leaves)) == f"{tmp_path}/net.py:12 in leaves"
    assert place_of(caught(net.chained, x)) == f"{tmp_path}/net.py:3 in forward", "where the first of them came from"
    monkeypatch.chdir(tmp_path)
    assert place_of(caught(net.forward, x)) == "net.py:3 in forward"


def test_an_installed_package_where_there_is_nothing_of_the_user_s(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stack_position, "_OURS", str(Path(__file__).parent))  # or this test is the user's code
    stack_position._whose.cache_clear()
    try:
        other = users(tmp_path, "lib/site-packages/models/llama.py")
        torchs = users(tmp_path, "lib/site-packages/torch/nn.py")
        assert place_of(caught(other.forward, torch.zeros(3, 3))).endswith("models/llama.py:3 in forward")
        assert place_of(caught(torchs.forward, torch.zeros(3, 3))) == ""
        assert place_of(ValueError("never raised")) == ""
    finally:
        stack_position._whose.cache_clear()


def held_in(file: Path) -> bool:
    """Whether a thread that waits in a function of `file` is seen as one that waits for others."""
    there, go = threading.Event(), threading.Event()
    scope = {"there": there, "go": go}
    exec(compile("def hold():\n    there.set()\n    go.wait()\n", str(file), "exec"), scope)
    asking = threading.Thread(target=scope["hold"])  # type: ignore[arg-type]
    asking.start()
    try:
        assert there.wait(20)
        return any(stand().waits for _ in range(100) if not threading.Event().wait(0.001))
    finally:
        go.set()
        asking.join()


def test_only_the_code_of_comm_waits_for_others() -> None:
    package = Path(gossamer.__file__).parent
    assert held_in(package / "comm" / "a_file.py")
    assert not held_in(package / "run" / "a_file.py")
    assert not held_in(package.parent / "gossamer_comm" / "a_file.py")


def test_a_file_beside_the_package_is_the_user_s(monkeypatch) -> None:
    package = Path(gossamer.__file__).parent
    beside = users(package.with_name("gossamer_nets"))
    assert place_of(caught(beside.forward, torch.zeros(3, 3))).endswith("gossamer_nets/net.py:3 in forward")


class Nowhere:
    """A channel on which nothing is sent."""

    def start(self, message: Message) -> NoReturn:
        raise AssertionError("nothing is sent")


def waits(method: Iterator[Message] | None, there: threading.Event, go: threading.Event) -> bool:
    """What is seen of a process that asks for the result of `method`, once it has been begun."""
    pump = CommThread(Nowhere())  # type: ignore[arg-type]
    step = pump.begin((1,))
    if method is not None:
        step.submit(0, method)  # type: ignore[arg-type]
    asking = threading.Thread(target=lambda: caught(step.result, 0))
    asking.start()
    try:
        assert there.wait(20)
        seen = [stand().waits for _ in range(300) if not threading.Event().wait(0.001)]
        return any(seen)
    finally:
        go.set()
        step.drop()
        pump.close()
        asking.join()


def test_who_asks_for_a_message_waits_unless_his_own_is_still_being_made() -> None:
    there, go = threading.Event(), threading.Event()

    def held_up() -> Iterator[Message]:
        there.set()
        go.wait()
        raise ValueError("never sent")
        yield Message((torch.zeros(1),), Collective.SUM)

    assert not stand().waits
    assert not waits(held_up(), there, go)
    assert waits(None, there, go)
