"""Decisions that others wait for, and folders that reach them: hosts as threads over sockets, ranks over a store."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossamer.launch import agreement_hosts
from gossamer.launch.agreement import Agreement, Alone, Line, Word
from gossamer.launch.agreement_hosts import FolderOffer, HostSockets, OfferedFile
from gossamer.launch.agreement_ranks import RankStore
from gossamer.process.json_lines import write_line
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, RunFailed, WireMismatch

HOSTS = ("a", "b", "c")
Act = Callable[[Any], Any]


@contextmanager
def hosts(*, shared: bool = False) -> Iterator[list[Callable[[], HostSockets]]]:
    """What constructs the line of each of three hosts, whose connections are closed at the end."""
    pairs = [socket.socketpair(socket.AF_UNIX) for _ in HOSTS[1:]]
    others: list[dict[int, socket.socket]] = [{1 + i: pair[0] for i, pair in enumerate(pairs)}]
    others += [{0: pair[1]} for pair in pairs]
    try:
        yield [
            lambda host=host: HostSockets(others=others[host], hostnames=HOSTS, host=host, shared=shared)  # type: ignore[misc]
            for host in range(3)
        ]
    finally:
        for pair in pairs:
            for one in pair:
                one.close()


@contextmanager
def ranks() -> Iterator[list[Callable[[], RankStore]]]:
    store = dist.HashStore()
    yield [lambda rank=rank: RankStore(store, rank, 3) for rank in range(3)]  # type: ignore[misc]


def everywhere(lines: list[Callable[[], Any]], act: Act) -> list[Any]:
    """Return what `act` returned or raised on each line."""

    def one(make: Callable[[], Line]) -> Any:
        try:
            return act(make())
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(lines)) as pool:
        return [*pool.map(one, lines)]


@pytest.fixture(params=[hosts, ranks])
def lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Line]]]:
    for name in agreement_hosts._KEEP_ALIVE:  # of no socket of this family
        monkeypatch.delattr(socket, name, raising=False)
    with request.param() as found:
        yield found


def refuse(error: BaseException) -> Callable[[], str]:
    def make() -> str:
        raise error

    return make


def test_all_learn_what_the_first_decided_in_order(lines: list[Callable[[], Line]]) -> None:
    made: list[int] = []

    def act(line: Line) -> list[str]:
        return [Agreement(line).agreed(lambda n=n: made.append(n) or f"{n}") for n in range(5)]  # type: ignore[misc]

    assert everywhere(lines, act) == [["0", "1", "2", "3", "4"]] * 3
    assert made == [0, 1, 2, 3, 4], "it was done once"


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (BadInput("wanted x, got y", key="train.steps"), BadInput, "train.steps: wanted x, got y"),
        (Interrupted("asked"), Interrupted, "asked"),
        (RunFailed("the disk is full"), RunFailed, "the disk is full"),
        (ValueError("odd"), RunFailed, "ValueError: odd"),
    ],
)
def test_an_error_of_the_first_ends_all_with_its_message(
    lines: list[Callable[[], Line]], error: Exception, kind: type[Exception], said: str
) -> None:
    first, *others = everywhere(lines, lambda line: Agreement(line).agreed(refuse(error)))
    assert first is error
    assert [type(one) for one in others] == [kind] * 2 and [str(one) for one in others] == [said] * 2


def test_a_refusal_of_one_ends_all(lines: list[Callable[[], Line]]) -> None:
    def act(numbered: tuple[int, Callable[[], Line]]) -> Any:
        number, make = numbered
        why = BadInput("no room") if number == 1 else None
        try:
            return Agreement(make()).agreed(lambda: "done", lambda: why)
        except BadInput as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(act, enumerate(lines))] == ["no room"] * 3


def test_one_process_agrees_with_itself() -> None:
    assert Agreement(Alone()).agreed(lambda: "x") == "x"
    with pytest.raises(Interrupted):
        Agreement(Alone()).agreed(lambda: "x", lambda: Interrupted("no"))


def test_the_holder_of_a_store_leaves_last() -> None:
    left: list[int] = []

    def act(line: RankStore) -> None:
        if line.is_first:
            line.leave()
            left.append(0)
        else:
            left.append(line.rank)
            line.leave()

    with ranks() as found:
        everywhere(found, act)
    assert sorted(left[:2]) == [1, 2] and left[2] == 0


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_left_without_a_word_is_waited_for_no_longer(gone: int) -> None:
    def act(line: RankStore) -> str:
        try:
            return "left" if line.rank == gone else Agreement(line).agreed(lambda: "on")
        finally:
            line.leave()

    with ranks() as found:
        ends = everywhere(found, act)
    others = [one for rank, one in enumerate(ends) if rank != gone]
    assert ends[gone] == "left" and all(type(one) is PeerLost for one in others), ends
    assert f"rank {gone} ended between phases" in str(others[0])


@pytest.fixture
def unix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in agreement_hosts._KEEP_ALIVE:
        monkeypatch.delattr(socket, name, raising=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def test_a_folder_reaches_hosts_with_disks_of_their_own(tmp_path: Path, unix: None) -> None:
    folders = [tmp_path / host / "starts" / "02" for host in HOSTS]
    folders[0].mkdir(parents=True)
    (folders[0] / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)  # 5 MB
    (folders[0] / "empty").write_bytes(b"")
    folders[1].mkdir(parents=True)
    (folders[1] / "model.safetensors").write_bytes(b"of another method")
    (folders[1] / "stale").write_bytes(b"")
    agreed: Act = lambda line: (line.give(folders[line.host]), Agreement(line).agreed(lambda: "on"))  # noqa: E731
    with hosts() as lines:
        assert everywhere(lines, agreed) == [(None, "on")] * 3
    assert contents(folders[0]) == contents(folders[1]) == contents(folders[2])
    kept = (folders[2] / "model.safetensors").stat().st_ino
    with hosts() as lines:
        assert everywhere(lines, agreed) == [(None, "on")] * 3
    assert (folders[2] / "model.safetensors").stat().st_ino == kept, "what is there is not sent again"
    assert [one.name for one in (tmp_path / "b" / "starts").iterdir()] == ["02"]
    (folders[1] / "model.safetensors.index.json").write_text("a reader takes this one first")
    with hosts() as lines:
        assert everywhere(lines, agreed) == [(None, "on")] * 3
    assert contents(folders[1]) == contents(folders[0])


@pytest.mark.parametrize("name", ["a folder", "sub", "model\u00fc.bin"])
def test_what_cannot_be_sent_is_refused_rather_than_left_out(tmp_path: Path, unix: None, name: str) -> None:
    (tmp_path / name).mkdir() if name == "sub" else (tmp_path / name).write_text("")
    (tmp_path / ".nfs0001").write_text("")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.sendall(write_line(Word()))
        line = HostSockets(others={1: theirs}, hostnames=HOSTS[:2], host=0, shared=False)
        with pytest.raises(RunFailed, match=f"{name} does not go to other hosts"):
            line.give(tmp_path)


def test_the_error_of_the_first_is_raised_where_the_store_is_gone() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    line = RankStore(Gone(), 0, 2)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="no room"):
        Agreement(line).agreed(refuse(BadInput("no room")))
    with pytest.raises(PeerLost, match="Broken pipe"):
        Agreement(line).agreed(lambda: "on")


def test_a_host_that_cannot_write_says_so_and_all_hear_it(tmp_path: Path, unix: None) -> None:
    folders = [tmp_path / host / "02" for host in HOSTS]
    folders[0].mkdir(parents=True)
    (folders[0] / "x").write_bytes(bytes(3_000_000))
    (tmp_path / "b").write_text("a file where its folder should be")

    def act(line: HostSockets) -> str:
        why = line.give(folders[line.host])
        return Agreement(line).agreed(lambda: "on", lambda: why)

    with hosts() as lines:
        found = everywhere(lines, act)
    assert all(type(one) is RunFailed and "was not written on host b" in str(one) for one in found), found
    assert contents(folders[2]) == contents(folders[0]), "the other got it whole"


def test_hosts_that_share_a_folder_wait_until_they_see_it(tmp_path: Path, unix: None, monkeypatch: Any) -> None:
    monkeypatch.setattr("gossamer.launch.agreement.SEEN_S", 0.2)
    seen, unseen = tmp_path / "seen", tmp_path / "unseen"
    seen.mkdir()
    (seen / "x").write_bytes(b"1")
    with hosts(shared=True) as lines:
        assert everywhere(lines, lambda line: line.give(seen)) == [None] * 3
    with hosts(shared=True) as lines:
        found = everywhere(lines, lambda line: line.give(seen if line.host != 2 else unseen))
    assert found[:2] == [None, None] and "none within" in str(found[2]) and "on host c" in str(found[2])


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", ".hidden", ""])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, unix: None, name: str) -> None:
    """A host checks what host 0 offers before it writes anything."""
    offer = {"files": [{"name": name, "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}]}
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        line = HostSockets(others={0: theirs}, hostnames=HOSTS[:2], host=1, shared=False)
        ours.sendall(json.dumps(offer).encode() + b"\nx")
        with pytest.raises(WireMismatch):
            line.give(tmp_path / "in" / "02")
    assert not [*tmp_path.iterdir()]


def test_bytes_that_are_others_are_not_kept(tmp_path: Path, unix: None) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        line = HostSockets(others={0: theirs}, hostnames=HOSTS[:2], host=1, shared=False)
        digest = hashlib.sha256(b"right").hexdigest()
        ours.sendall(write_line(FolderOffer(files=(OfferedFile(name="x", bytes=5, sha256=digest),))) + b"wrong")
        assert "with other bytes than host 0 has" in str(line.give(tmp_path / "02"))
    assert not [*tmp_path.iterdir()]


def test_a_folder_sent_halfway_is_not_there(tmp_path: Path, unix: None) -> None:
    """Nor is what a former attempt left beside it, where this host was killed."""
    (tmp_path / ".02.partial").mkdir()
    (tmp_path / ".02.partial" / "x").write_text("of a former attempt")
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        line = HostSockets(others={0: theirs}, hostnames=HOSTS[:2], host=1, shared=False)
        digest = hashlib.sha256(b"12345678").hexdigest()
        ours.sendall(write_line(FolderOffer(files=(OfferedFile(name="x", bytes=8, sha256=digest),))) + b"1234")
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost, match="host a left between phases"):
            line.give(tmp_path / "02")
    assert not [*tmp_path.iterdir()]


def test_a_host_that_left_is_named(unix: None) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        line = HostSockets(others={0: theirs}, hostnames=HOSTS[:2], host=1, shared=False)
        ours.close()
        with pytest.raises(PeerLost, match="host a left between phases"):
            line.heard()
        with pytest.raises(PeerLost, match="host a left"):
            line.tell(Word(text="x"))
            line.tell(Word(text="x"))


def test_a_host_that_takes_no_more_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel answers, but nobody reads: a process that was stopped, or a machine that is."""
    monkeypatch.setattr(agreement_hosts, "_TAKES_S", 0.3)
    (tmp_path / "large.bin").write_bytes(bytes(64 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            theirs.sendall(write_line(Word()) + write_line(Word(text="wanted")))
            line = HostSockets(others={1: ours}, hostnames=HOSTS[:2], host=0, shared=False)
            with pytest.raises(PeerLost, match="host b left between phases"):
                line.give(tmp_path)
