"""Parts of launching: ports, interfaces, messages, the black box, notes, the worker's frame."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from gossamer.launch import LaunchRequest, Limits, launch_local, run_worker
from gossamer.launch.failure_report import RankFailure
from gossamer.launch.interface import Interface, RateServer, candidates, choose, interfaces, measure_all, route_to
from gossamer.launch.port import listen, owner
from gossamer.launch.rendezvous_config import Node
from gossamer.launch.rendezvous_messages import JoinRequest
from gossamer.process import EventLoop, Heartbeat, HeartbeatServer, exit_text, read_error, write_error
from gossamer.process.json_lines import JsonLineReader, read_line, write_line
from gossamer.process.last_position import Position, PositionPage
from gossamer.process.out_of_memory import memory_events
from gossamer.spec.errors import BadInput, Interrupted, PeerLost, WireMismatch


def test_launching_imports_no_torch() -> None:
    program = "import sys, gossamer.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Ports and interfaces


def test_a_port_in_use_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} on 127.0.0.1 is in use") as caught:
            listen("127.0.0.1", port)
        if sys.platform == "linux":
            assert f"by process {os.getpid()} (" in str(caught.value)
    assert owner(port) == ""


def test_an_address_of_another_host() -> None:
    with pytest.raises(BadInput, match=r"192\.0\.2\.1 is not an address of this host, which has"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize("text", ["here", "a:b", "a:0", "a:70000", ":1", "a b:1"])
def test_no_rendezvous_endpoint(text: str) -> None:
    with pytest.raises(BadInput, match="--rdzv-endpoint: wanted HOST:PORT"):
        Node.parse(0, 2, text)


@pytest.mark.parametrize(("rank", "nodes"), [(2, 2), (-1, 2), (1, 1)])
def test_no_node_rank(rank: int, nodes: int) -> None:
    with pytest.raises(BadInput, match=rf"--node-rank: wanted 0 to {nodes - 1}, as --nnodes is {nodes}, got {rank}"):
        Node.parse(rank, nodes, "10.0.0.1:29400")


@pytest.mark.parametrize("nodes", [0, -1])
def test_no_nodes(nodes: int) -> None:
    with pytest.raises(BadInput, match=rf"--nnodes: wanted 1 or more, got {nodes}"):
        Node.parse(0, nodes, "10.0.0.1:29400")


def test_node_and_rendezvous_endpoint() -> None:
    assert Node.parse(1, 4, "10.0.0.1:29400") == Node(rank=1, nodes=4, address="10.0.0.1", port=29400)


def test_the_interface_to_oneself_is_the_loopback() -> None:
    own = route_to("127.0.0.1")
    assert own == "127.0.0.1"
    assert candidates("auto", "127.0.0.1") == tuple(device for device in interfaces() if device.address == own)
    with pytest.raises(BadInput, match=r"no network device 'loo'.*lo"):
        candidates("loo", "127.0.0.1")


def test_rates_are_measured_and_what_cannot_be_reached_is_left_out() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.3", 0))
        server = RateServer(["127.0.0.1", "127.0.0.2"])
        try:
            ports = {**server.ports, "127.0.0.3": closed.getsockname()[1]}
            rates = measure_all([Interface("lo", "127.0.0.1")], ports)
        finally:
            server.close()
    assert set(rates) == {"127.0.0.1", "127.0.0.2"}
    assert all(name == "lo" and rate > 0 for name, rate in rates.values())


def test_the_fastest_interface_that_reaches_all_is_chosen() -> None:
    slow, fast, broken = (Interface(f"eth{i}", f"10.0.{i}.1") for i in range(3))
    first = {slow.address: ("eth0", 10.0), fast.address: ("eth1", 30.0), broken.address: ("eth2", 99.0)}
    second = {slow.address: ("eth0", 12.0), fast.address: ("eth5", 20.0)}
    assert choose([slow, fast, broken], [first, second]) == fast
    with pytest.raises(
        BadInput, match=r"no network device of host 0 is reached by all hosts; tried eth2 \(10\.0\.2\.1\)"
    ):
        choose([broken], [first, second])


# Messages


def test_lines_are_cut_and_limited() -> None:
    lines = JsonLineReader(limit_bytes=8)
    assert lines.feed(b"ab") == []
    assert lines.feed(b"c\nd\n\ne") == [b"abc", b"d", b""]
    with pytest.raises(WireMismatch, match="at most 8 bytes, got 9"):
        lines.feed(b"x" * 8)


@pytest.mark.parametrize(
    "line",
    [b"no json", b"[]", b'{"rank": 1}', b'{"kind": "hello", "protocol": "1"}', b"\xff\xfe", b"[" * 100_000],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(WireMismatch):
        read_line(line, TypeAdapter(JoinRequest))


def test_a_message_with_a_field_too_many_is_refused() -> None:
    good = RankFailure(rank=0, host=0, hostname="a", pid=1, what="exited", cause="c")
    kind = TypeAdapter(RankFailure)
    assert read_line(good.model_dump_json().encode(), kind) == good
    with pytest.raises(WireMismatch, match="extra"):
        read_line(good.model_dump_json()[:-1].encode() + b', "extra": 1}', kind)


class Server:
    """A heartbeat server of rank 0 with its loop."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.server = HeartbeatServer(self.loop, [0])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.close()
        self.loop.close()

    def turn_until(self, *, phase: str = "", pid: int = -1) -> None:
        for _ in range(500):
            self.loop.turn(0.02)
            pulse = self.server.pulses[0]
            if (pulse.at.phase == phase and not pid >= 0) or (phase == "" and pulse.finished):
                return
        raise AssertionError(f"never came: {self.server.pulses[0]}")


def test_beats_arrive_and_end_with_a_goodbye() -> None:
    with Server() as at:
        heart = Heartbeat(0, at.server.address, at.server.token, period_s=0.1)
        heart.at(step=3, phase="exchange", op="bucket 1", sequence=9)
        at.turn_until(phase="exchange")
        pulse = at.server.pulses[0]
        assert (pulse.at.step, pulse.at.op, pulse.at.sequence, pulse.pid) == (3, "bucket 1", 9, os.getpid())
        heart.close()
        heart.close()
        at.turn_until()


@pytest.mark.parametrize(
    "said",
    [
        b'{"kind":"hello","token":"guess","rank":0,"pid":1,"generation":0}\n',
        b'{"kind":"hello","token":"r\xc3\xa4t","rank":0,"pid":1,"generation":0}\n',
        b'{"kind":"beat","rank":0,"step":1,"phase":"p","op":"","sequence":1,"progress_age_s":0.0,"first_step":0,'
        b'"longest_s":0.0}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 10_000,
    ],
)
def test_strangers_are_hung_up_on(said: bytes) -> None:
    with Server() as at:
        host, port = at.server.address.split(":")
        before = at.server.pulses[0]
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            stranger.settimeout(0.01)
            for _ in range(500):
                at.loop.turn(0.01)
                try:
                    assert stranger.recv(1) == b""
                    break
                except TimeoutError:
                    continue
                except ConnectionResetError:
                    break
            else:
                raise AssertionError("still connected")
        assert at.server.pulses[0] == before


def test_a_heartbeat_without_a_supervisor_is_silent() -> None:
    heart = Heartbeat(2)
    heart.at(step=1, phase="compute")
    heart.at(op="layer")
    assert (heart.now.rank, heart.now.step, heart.now.phase, heart.now.op) == (2, 1, "compute", "layer")
    heart.close()


def test_a_place_in_a_folder_whose_name_is_no_unicode_is_told_all_the_same() -> None:
    file = os.fsdecode(b"/caf\xe9/net.py")
    going, left = threading.Event(), threading.Event()
    code = compile("def forward(until):\n    until.wait(30)\n", file, "exec")
    names: dict[str, Callable[[threading.Event], None]] = {}
    exec(code, names)
    box = PositionPage()
    heart = Heartbeat(0, box=os.dup(box.descriptor))
    heart.at(op=file)
    assert box.read().op == "/caf?/net.py"
    said: list[bytes] = []

    def look() -> None:
        with suppress(Exception):
            while "net.py" not in heart.now.place and not left.is_set():
                pass
            said.append(write_line(heart.now))
        going.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    names["forward"](going)
    left.set()
    watcher.join()
    heart.close()
    box.close()
    assert len(said) == 1 and b"caf?/net.py:2 in forward" in said[0]


def test_the_black_box_holds_the_last_position() -> None:
    box = PositionPage()
    assert box.read() == Position()
    heart = Heartbeat(0, box=os.dup(box.descriptor))
    heart.at(step=2, phase="p" * 300, op="\N{GREEK SMALL LETTER ALPHA}", sequence=4)
    assert box.read() == Position(step=2, phase="p" * 200, op="\N{GREEK SMALL LETTER ALPHA}", sequence=4)
    heart.at(phase="x")
    heart.close()
    assert box.read().phase == "x"
    box.close()


# Notes and codes


def test_a_note_is_read_back_by_the_right_reader_only(tmp_path: Path) -> None:
    path = write_error(tmp_path / "errors", 3, ValueError("odd\N{SNOWMAN}\N{BEACH WITH UMBRELLA}\udc80"))
    report = read_error(tmp_path / "errors", 3, pid=os.getpid())
    assert report is not None
    assert (report.kind, report.message) == ("ValueError", "odd\N{SNOWMAN}\N{BEACH WITH UMBRELLA}?")
    assert read_error(tmp_path / "errors", 3, pid=1) is None, "an older process's note"
    assert read_error(tmp_path / "errors", 4, pid=os.getpid()) is None
    path.write_bytes(path.read_bytes()[:20])
    assert read_error(tmp_path / "errors", 3, pid=os.getpid()) is None


def test_exit_texts() -> None:
    assert (exit_text(3), exit_text(-9), exit_text(-200)) == ("exit code 3", "signal SIGKILL", "signal 200")


def test_memory_events_of_a_process_that_is_gone() -> None:
    assert memory_events(2**30).killed_since() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (BadInput("x"), 2), (RuntimeError("x"), 3), (Interrupted("x"), 4), (PeerLost("x"), 75)],
)
def test_what_a_worker_exits_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, code: int
) -> None:
    import signal

    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "1", "GOSSAMER_ERRORS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def body(ready: object) -> None:
        if error is not None:
            raise error

    try:
        assert run_worker(body) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(list(tmp_path.glob("rank-00000.json"))) == (code not in (0, 4))


# A launch


def test_a_program_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_local(["/no/such/program"], 1, rundir=tmp_path, env={"A": "1"}) == 3
    assert "cannot start /no/such/program: No such file or directory" in capfd.readouterr().err


def test_no_processes(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least 1 process"):
        LaunchRequest(argv=("true",), processes=0, rundir=tmp_path)


def test_workers_get_their_environment_and_the_users(tmp_path: Path) -> None:
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    assert launch_local([sys.executable, "-c", program], 2, rundir=tmp_path, echo=False, env={"MINE": "7"}) == 0
    import json

    seen = [json.loads((tmp_path / f"logs/rank-0000{rank}.log").read_text()) for rank in range(2)]
    assert [s["RANK"] for s in seen] == ["0", "1"]
    assert {s["MASTER_PORT"] for s in seen} == {seen[0]["MASTER_PORT"]}
    assert all(s["MINE"] == "7" and s["WORLD_SIZE"] == "2" and int(s["OMP_NUM_THREADS"]) >= 1 for s in seen)
    assert {s["GLOO_SOCKET_IFNAME"] for s in seen} == {"lo"}
    assert Limits().heartbeat_s == float(seen[0]["GOSSAMER_HEARTBEAT_S"])


def test_rank_0_inherits_the_socket_that_all_ranks_are_told_of(tmp_path: Path) -> None:
    """Nobody else can have the port in between, as one that is only free at that moment."""
    program = (
        "import os, socket\n"
        "told = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "socket.create_connection(told).close()\n"  # rank 0 may not have looked at it yet
        "if os.environ['RANK'] == '0':\n"
        "    held = socket.socket(fileno=int(os.environ['GOSSAMER_LISTENER']))\n"
        "    assert held.getsockname() == told and held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)\n"
        "    held.accept()\n"
        "else:\n"
        "    assert 'GOSSAMER_LISTENER' not in os.environ\n"
    )
    assert launch_local([sys.executable, "-c", program], 2, rundir=tmp_path, echo=False) == 0
