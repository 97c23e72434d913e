"""States in tiers with an update process: the numbers of the threads bit for bit, its faults, what it leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.comm.message import ProcessGroups
from gossamer.optimizer.adamw import AdamW
from gossamer.process.companion_link import CompanionLink
from gossamer.process.json_channel import JsonChannel
from gossamer.process.spawn import process_state
from gossamer.run.gradient_memory import GradientMemory
from gossamer.run.update_messages import TO_PROCESS, LayoutAt, Setup
from gossamer.run.update_process import UpdateProcess
from gossamer.run.update_server import rule_of, serve
from gossamer.sharding import RowPartition, TierLayout, TierShares, read_tiers
from gossamer.spec.errors import BadInput, RunFailed
from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from gossamer.store.tier_file import PAGE
from sharding.test_tiers import Blocks, trained

LIMITS = {"device": "64MB", "host": "64MB", "file": "64MB"}
APART = {**LIMITS, "update": "process"}
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory as on Linux")


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs set the allocator by this variable."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", os.environ.get("THP_MEM_ALLOC_ENABLE", "0"))


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the update process runs is in a thread, at the other end of a real connection."""

    def to_new(module: str, kind: Any, *, descriptors: Any, timeout_s: float, **said: str) -> CompanionLink[Any]:
        ours, theirs = socket.socketpair()
        channel = JsonChannel(theirs, TO_PROCESS)
        servers.append(threading.Thread(target=serve, args=(channel,), daemon=True))
        servers[-1].start()
        process = subprocess.Popen(["sleep", "600"])
        link: CompanionLink[Any] = CompanionLink(process, JsonChannel(ours, kind), timeout_s, **said)
        return link

    def close(self: UpdateProcess) -> None:
        self._is_closed = True
        self.link.channel.connection.shutdown(socket.SHUT_RDWR)
        servers[-1].join()
        end(self)

    servers, end = list[threading.Thread](), UpdateProcess.close
    monkeypatch.setattr(CompanionLink, "to_new", staticmethod(to_new))
    monkeypatch.setattr(UpdateProcess, "close", close)


def saved(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights and optimizer states of the newest checkpoint."""
    there = Path(found["directory"], "checkpoints")
    known = open_checkpoint(there, max(list_checkpoints(there)))
    return {name: known.read(name) for name in known.names() if not name.startswith("rng/")}


def same(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, one in others.items():
        assert torch.equal(ours[name], one), name


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"max_grad_norm": 0.1, "accumulate": 2, "evaluate_every": 2},
        pytest.param({"max_grad_norm": 0.1}, marks=pytest.mark.nightly),
        pytest.param({"accumulate": 2, "evaluate_every": 2}, marks=pytest.mark.nightly),
    ],
)
def test_it_is_the_form_in_threads_and_plain_training(tmp_path: Path, inside: None, train: dict[str, Any]) -> None:
    """With the smallest limits, so that backward waits for memory that the process gives back."""
    limits = {**APART, "host": 12144640} if not train else APART
    ours, threads, plain = (
        saved(trained(tmp_path / name, Blocks(), given, steps=4, checkpoint_every=4, **train))
        for name, given in (("a", limits), ("b", LIMITS), ("c", None))
    )
    same(ours, plain)
    same(threads, plain)


def test_a_process_that_is_killed_is_a_fault_that_names_it_and_leaves_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of backward. The run goes on from its checkpoint, and ends as plain training does."""
    pids, submit = list[int](), UpdateProcess.submit

    def killing(self: UpdateProcess, index: int, *given: Any) -> None:
        submit(self, index, *given)
        if given[-1].step == 3 and index == 3:
            while not self.progress.written:
                time.sleep(0.001)
            pids.append(self.link.process.pid)
            os.kill(pids[-1], signal.SIGKILL)

    given = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9}
    with monkeypatch.context() as patched:
        patched.setattr(UpdateProcess, "submit", killing)
        with pytest.raises(RunFailed, match=r"update process of this rank \(process \d+\) ended with signal SIGKILL"):
            trained(tmp_path, Blocks(), APART, **given)
    assert len(pids) == 1 and process_state(pids[0]) == ""
    updates, left = read_tiers(tmp_path / "tiers")
    plain = trained(tmp_path / "plain", Blocks(), None, **{**given, "checkpoint_every": 1})
    known = open_checkpoint(Path(plain["directory"], "checkpoints"), updates)
    assert updates == 3
    for (name, slot), one in left.items():
        assert torch.equal(one, known.read(f"optim/{slot}/{name}" if slot else f"model/{name}")), name
    same(saved(trained(tmp_path, Blocks(), APART, resume="auto", **given)), saved(plain))
    assert list((tmp_path / "tiers").iterdir()) == []


def layout_of() -> tuple[AdamW, TierLayout]:
    rule = AdamW()
    params = {"a": torch.empty(3, 5), "b": torch.empty(4097), "frozen": torch.empty(2)}
    alone = TierShares(RowPartition(ProcessGroups.flat(1)), 0)
    return rule, TierLayout.of(params, [("b",), ("a",)], rule, keeps_gradients=True, shares=alone)


def test_gradients_are_seen_at_both_ends_and_are_zeros_once_given_back() -> None:
    _, layout = layout_of()
    ours = GradientMemory.new(layout)
    theirs = GradientMemory.at(os.dup(ours.descriptor), layout)
    for index in (0, 1):
        assert not ours.gradient(index).any()
        ours.gradient(index).fill_(index + 1.0)
        assert torch.equal(theirs.gradient(index), ours.gradient(index))
    assert os.fstat(ours.descriptor).st_blocks * 512 == 6 * PAGE
    theirs.free(0)
    assert os.fstat(ours.descriptor).st_blocks * 512 == PAGE
    assert not ours.gradient(0).any() and ours.gradient(1).all()
    ours.close()
    theirs.close()


def test_a_layout_is_the_same_after_a_message() -> None:
    _, layout = layout_of()
    assert LayoutAt.model_validate_json(LayoutAt.of(layout).model_dump_json()).layout == layout


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ('{"adamw": {"lr": 0.5}}', r"wanted AdamW.*in the update process, as in its rank, got .*lr=0.5"),
        (
            '{"from_class": {"path": "__main__:OfANotebook", "lr": 0.1}}',
            r"wanted an optimizer that a fresh interpreter can build.*has no function 'OfANotebook'.*update to threads",
        ),
    ],
)
def test_another_optimizer_in_the_process_is_refused(optimizer: str, said: str) -> None:
    rule, layout = layout_of()
    setup = Setup(
        optimizer=optimizer,
        rule=repr(rule),
        layout=LayoutAt.of(layout),
        path="",
        is_direct=False,
        file_descriptor=-1,
        gradients_descriptor=-1,
        windows=1,
        threads=1,
    )
    with pytest.raises(BadInput, match=said):
        rule_of(setup)


_PROGRAM = """
from pathlib import Path
from sharding.test_tiers import Blocks, trained
limits = {{"device": "64MB", "host": "64MB", "file": "64MB", "update": "process"}}
trained(Path({folder!r}), Blocks(), limits, steps=100_000)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_update_process_outlives_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C reaches both processes, as in a terminal, and the run is saved."""
    rank = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(folder=str(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not any('"step"' in file.read_text() for file in tmp_path.glob("runs/*/records.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.2)
    (process,) = map(int, Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split())
    os.killpg(rank.pid, number) if number == signal.SIGINT else os.kill(rank.pid, number)
    rank.wait(60)
    while process_state(process) not in ("", "Z"):
        assert time.monotonic() < until + 20
        time.sleep(0.1)
    assert any(tmp_path.glob("runs/*/checkpoints/step-*")) == (number == signal.SIGINT)
    assert any((tmp_path / "tiers").iterdir()) == (number == signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "coat", "muon", "lamb", {"from_class": {}}, "sst"])
def test_every_optimizer_updates_in_the_process(tmp_path: Path, optimizer: Any) -> None:
    ours, plain = (
        saved(
            trained(tmp_path / str(apart), Blocks(), APART if apart else None, optimizer=optimizer, checkpoint_every=3)
        )
        for apart in (True, False)
    )
    same(ours, plain)
