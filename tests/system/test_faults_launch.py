"""Every way a worker, a supervisor or a host can end, over real processes: who is named, what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gossamer.launch import HostFingerprint, LaunchRequest, Limits, RunEnd, launch_here
from gossamer.launch.rendezvous_messages import Peer, hello_of
from gossamer.netlab import Lab, LabTopology, lab_unavailable
from gossamer.netlab.names import DEVICE
from gossamer.process.error_reports import error_path
from gossamer.process.spawn import process_state
from ports import free_port

HERE = Path(__file__).parent
LIMITS = Limits(heartbeat_s=0.8, progress_timeout_s=60.0, settle_s=20.0, kill_s=0.5)  # peers may say their own
HANGS_S = 6.0  # without progress, in the tests of that; a busy machine starts two ranks seconds apart


def launch(
    rundir: Path,
    how: str,
    *,
    processes: int = 3,
    step_s: float = 0.02,
    say: list[str] | None = None,
    limits: Limits = LIMITS,
) -> RunEnd:
    heard = [] if say is None else say
    argv = (sys.executable, str(HERE / "launch_worker.py"), str(step_s), "6", how, f"at={rundir}")
    start = LaunchRequest(argv=argv, processes=processes, rundir=rundir, limits=limits, say=heard.append, threads=1)
    return launch_here(start)


def eventually(is_so: Callable[[], bool], *, within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.02)


def marked(mark: str) -> set[int]:
    """Living processes that have `mark` among their arguments."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words and process_state(int(folder.name)) not in ("Z", ""):
            found.add(int(folder.name))
    return found


def test_a_run_that_ends_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(tmp_path, "none") == RunEnd(exit_code=0)
    assert capfd.readouterr().out.splitlines() == [f"step {step}" for step in range(6)]
    assert "step 5" in (tmp_path / "logs/rank-00000.log").read_text()
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [f"rank-{r:05d}.log" for r in range(3)]
    assert not (tmp_path / "errors").exists()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "killed by SIGKILL"),
        ("segv", "crashed in native code"),
        ("exit", "exit code 9"),
        ("raise", "RuntimeError: the matrix is singular"),
        ("leave0", "ended without an error message at step 2, compute: exit code 0"),
        ("leave4", "ended without an error message at step 2, compute: exit code 4"),
        ("leave75", "ended without an error message at step 2, compute: exit code 75"),
        ("quit", "SystemExit: 0"),
    ],
)
def test_the_first_rank_that_dies_is_named_and_the_others_are_collateral(tmp_path: Path, how: str, cause: str) -> None:
    outcome = launch(tmp_path, how)
    assert outcome.exit_code == 3
    assert outcome.blame is not None
    first = outcome.blame.first
    assert (first.rank, first.step, first.phase, first.op, first.sequence) == (1, 2, "compute", "layer 3", 4)
    assert cause in first.cause
    assert {f.rank for f in outcome.blame.collateral} == {0, 2}
    assert outcome.blame.others == ()
    for piece in (cause, "step 2, compute, last operation layer 3", "rank-00001.log", f"gossamer resume {tmp_path}"):
        assert piece in " ".join(outcome.text.split())


def test_what_happens_once_all_is_saved_and_written_down_is_no_failure(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from gossamer.launch import run_worker\n"
        "def body(ready):\n"
        "    rank = ready.place.rank\n"
        "    ready.heartbeat.leave(0, for_all=rank == 0) if rank == 0 else None\n"
        "    os.kill(os.getpid(), signal.SIGKILL if rank else signal.SIGSEGV)\n"
        "sys.exit(run_worker(body))\n"
    )
    start = LaunchRequest(argv=(sys.executable, "-c", program), processes=2, rundir=tmp_path, limits=LIMITS, threads=1)
    assert launch_here(start) == RunEnd(exit_code=0)


OUTSTAYS = """
import sys, threading
from gossamer.launch import run_worker
from gossamer.spec.errors import BadInput, Interrupted
def prefetch():
    threading.Event().wait()
def body(ready):
    if ready.place.rank == 1:
        threading.Thread(target=prefetch).start()
        {ends}
sys.exit(run_worker(body))
"""
SUPERVISES = """
import sys
from pathlib import Path
from gossamer.launch import LaunchRequest, Limits, launch_here
rundir, worker = sys.argv[1:]
limits = Limits(heartbeat_s=2.5, grace_s=1.0, settle_s=1.0, kill_s=0.5)
start = LaunchRequest(argv=(sys.executable, "-c", worker), processes=2, rundir=Path(rundir), limits=limits, threads=1)
end = launch_here(start)
print(end.exit_code, end.blame and (end.blame.first.rank, end.blame.first.cause))
"""


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ("pass", "0 None"),
        ("raise Interrupted('saved')", "4 None"),
        ("raise BadInput('a shorter corpus')", "2 (1, 'BadInput: a shorter corpus')"),
        ("raise KeyError('row 7')", "3 (1, \"KeyError: 'row 7'\")"),
    ],
)
def test_a_thread_that_does_not_end_holds_up_no_run(tmp_path: Path, ends: str, outcome: str) -> None:
    argv = [sys.executable, "-c", SUPERVISES, str(tmp_path), OUTSTAYS.format(ends=ends)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == outcome
    assert "rank 1 on " in done.stderr and "as a thread of it does not end: it is killed" in done.stderr
    assert "in prefetch" in (tmp_path / "logs/rank-00001.log").read_text()


def test_a_workers_own_word_counts_for_itself_alone(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from gossamer.launch import run_worker\n"
        "def body(ready):\n"
        "    if ready.place.rank:\n"
        "        ready.heartbeat.leave(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(run_worker(body))\n"
    )
    start = LaunchRequest(argv=(sys.executable, "-c", program), processes=2, rundir=tmp_path, limits=LIMITS, threads=1)
    outcome = launch_here(start)
    assert outcome.blame is not None
    assert (outcome.exit_code, outcome.blame.first.rank, outcome.blame.others) == (3, 0, ())


def test_the_note_of_a_failing_rank_holds_its_trace(tmp_path: Path) -> None:
    launch(tmp_path, "raise")
    note = json.loads(error_path(tmp_path / "errors", 1).read_text())
    assert note["kind"] == "RuntimeError"
    assert "misbehave" in note["trace"]
    assert not list((tmp_path / "errors").glob("*.part"))


def test_bad_input_found_by_a_worker_is_one_plain_message(tmp_path: Path) -> None:
    outcome = launch(tmp_path, "bad")
    assert (outcome.exit_code, outcome.text) == (2, "wanted 8 sequences, got 3: use a longer corpus")


def test_a_stopped_rank_is_named_with_its_last_operation(tmp_path: Path) -> None:
    outcome = launch(tmp_path, "stop")
    assert outcome.blame is not None
    first = outcome.blame.first
    assert (outcome.exit_code, first.rank, first.what, first.op) == (3, 1, "stopped", "layer 3")
    assert {f.rank for f in outcome.blame.collateral} == {0, 2}


def test_a_hung_rank_is_blamed_not_the_ones_that_wait_for_it(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = launch(tmp_path, "sleep", say=said, limits=replace(LIMITS, progress_timeout_s=HANGS_S))
    assert outcome.blame is not None
    first = outcome.blame.first
    assert (outcome.exit_code, first.rank, first.what, first.step) == (3, 1, "hung", 2)
    assert "ranks 0, 2 wait for it" in first.cause
    log = (tmp_path / "logs/rank-00001.log").read_text()
    assert "misbehave" in log and "hread 0x" in log, "the stack of its main thread, and then all of them"
    assert len([text for text in said if "rank 1" in text and "is slow" in text]) == 1, "named early, once"


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    launch(tmp_path, "child")
    eventually(lambda: not marked(f"at={tmp_path}"))


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launching command whose workers carry tmp_path as an argument; nothing of it survives."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            str(HERE / "launch_local_run.py"),
            str(tmp_path),
            "0.05",
            "100000",
            how,
            f"at={tmp_path}",
        ]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "step 0\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    eventually(lambda: not marked(f"at={tmp_path}"))


Command = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_once_it_saves_and_stops(command: Command, tmp_path: Path, number: signal.Signals) -> None:
    process = command("none")
    os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
    _, said = process.communicate(timeout=20)
    assert process.returncode == 4
    assert "stopped, with a checkpoint" in said
    assert f"gossamer resume {tmp_path}" in said


def test_asked_twice_it_stops_at_once(command: Command, tmp_path: Path) -> None:
    process = command("stubborn")
    assert process.stderr is not None
    os.killpg(process.pid, signal.SIGINT)
    assert "ask once more" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "stopped before a new checkpoint was saved" in said
    assert not marked(f"at={tmp_path}")


def test_a_killed_supervisor_leaves_nobody(command: Command, tmp_path: Path) -> None:
    process = command("child")
    eventually(lambda: len(marked(f"at={tmp_path}") - {process.pid}) == 3)  # two workers, and a child of one
    process.kill()
    process.wait()
    eventually(lambda: not marked(f"at={tmp_path}"))


def test_a_stopped_supervisor_is_no_alarm(command: Command) -> None:
    process = command("none")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5)  # longer than a heartbeat period
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 4


def test_a_worker_whose_supervisor_hangs_up_ends_itself(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom gossamer.process import Heartbeat\n"
        "Heartbeat(0, sys.argv[1], 't', period_s=1.0)\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        worker = subprocess.Popen([sys.executable, "-c", program, address], stdout=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        connection.close()
        worker.communicate(timeout=20)
    assert worker.returncode == 76


# Several hosts


class Hosts:
    """Hosts of one meeting, all on this machine."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path, self._port = tmp_path, free_port()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, **given: object) -> subprocess.Popen[str]:
        fields = {"host": host, "address": "127.0.0.1", "port": self._port, "runs": str(self._tmp_path / str(host))}
        argv = [sys.executable, str(HERE / "launch_host.py"), json.dumps(fields | given)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def ends(self) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of every host, in the order they were started."""
        said = [process.communicate(timeout=60) for process in self.processes]
        return [(process.returncode, *texts) for process, texts in zip(self.processes, said, strict=True)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


def test_two_hosts_run_as_one(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(1, processes=1, checkpoints=[2, 4, 8], run="other name")
    hosts.start(0, processes=2, checkpoints=[2, 4, 6])
    (code1, out1, _), (code0, out0, _) = hosts.ends()
    assert (code0, code1) == (0, 0)
    assert "offset=0, ranks=3" in out0
    assert "offset=2, ranks=3" in out1
    for out in (out0, out1):
        assert "resume_step=4" in out
        assert "shared=False" in out
        assert "interface='lo'" in out
    assert (tmp_path / "1/r/logs/rank-00002.log").exists(), "the run's name is host 0's"


def test_hosts_that_share_the_run_directory_know_it(hosts: Hosts, tmp_path: Path) -> None:
    for host in (0, 1):
        hosts.start(host, processes=1, runs=str(tmp_path / "common"))
    assert all(code == 0 and "shared=True" in out for code, out, _ in hosts.ends())
    assert not list((tmp_path / "common/r").glob(".meeting*"))


def test_the_first_failing_rank_of_all_hosts_is_named_on_all_hosts(hosts: Hosts) -> None:
    hosts.start(0, processes=1, worker=["0.02", "6", "kill"])
    hosts.start(1, processes=2, worker=["0.02", "6", "kill"])  # rank 1 is this host's first
    (code0, out0, _), (code1, out1, _) = hosts.ends()
    assert (code0, code1) == (3, 3)
    assert out0[out0.index("OUTCOME") :] == out1[out1.index("OUTCOME") :]
    assert "first failing rank  1 on host" in out0
    assert "lost their peer     rank 0 on" in out0


def test_a_hung_rank_of_another_host_is_blamed_by_host_0(hosts: Hosts, tmp_path: Path) -> None:
    for host in (0, 1):
        hosts.start(host, processes=1, worker=["0.02", "6", "sleep"], progress_timeout_s=HANGS_S)
    (code0, out0, _), (code1, _, _) = hosts.ends()
    assert (code0, code1) == (3, 3)
    assert "first failing rank  1 on host" in out0
    assert "rank 0 waits for it" in out0
    assert "misbehave" in (tmp_path / "1/r/logs/rank-00001.log").read_text()


def test_a_stop_on_one_host_stops_all_and_saves(hosts: Hosts) -> None:
    for host in (0, 1):
        hosts.start(host, processes=1, worker=["0.05", "100000", "none"])
    for process in hosts.processes:
        assert process.stdout is not None
        assert "MEETING" in process.stdout.readline()
    assert hosts.processes[0].stdout is not None
    assert hosts.processes[0].stdout.readline() == "step 0\n"
    hosts.processes[1].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in hosts.ends()] == [4, 4]


def test_a_lost_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    for host in (0, 1):
        hosts.start(host, processes=1, worker=["0.05", "100000", "none"])
    first, second = hosts.processes
    assert first.stdout is not None
    assert second.stdout is not None
    assert "MEETING" in second.stdout.readline()
    assert "MEETING" in first.stdout.readline()
    assert first.stdout.readline() == "step 0\n"
    second.kill()
    out, _ = first.communicate(timeout=30)
    assert first.returncode == 3
    assert "every rank of host" in out
    assert "the supervisor on host" in out


def test_every_disagreement_is_one_message_on_all_hosts(hosts: Hosts) -> None:
    hosts.start(0, hosts=3)
    hosts.start(1, hosts=3, versions={"gossamer": "0.0.9", "torch": "2.13"})
    hosts.start(2, hosts=3, config="x", data="")
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [2, 2, 2]
    messages = [said[said.index("the hosts do not agree") :] for _, _, said in ends]
    assert messages[0] == messages[1] == messages[2]
    for line in (
        "has gossamer 0.0.9, host 0 has 0.1.0",
        "has torch 2.13, host 0 has none",
        "has another configuration (x, host 0 has c)",
        "has no data, host 0 has d",
    ):
        assert line in messages[0]


def test_a_host_number_given_twice_is_refused(hosts: Hosts) -> None:
    hosts.start(0, hosts=3)
    hosts.start(1, hosts=3)
    hosts.start(1, hosts=3)
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [2, 2, 2]
    assert all("was started with --node-rank 1, but another host has that number" in said for _, _, said in ends)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_host_that_ended_before_all_had_met_may_come_back(hosts: Hosts, order: tuple[int, int]) -> None:
    """Also after all others have come: its place is not taken by what it left."""
    hosts.start(0, hosts=3, processes=1)
    facts = HostFingerprint(processes=1, versions={"gossamer": "0.1.0"}, config="c", data="d")

    def come_and_go() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", hosts._port), timeout=5) as connection:
                Peer(connection).send(hello_of(facts, host=1, hosts=3))
            return True
        except ConnectionRefusedError:
            return False

    eventually(come_and_go)
    for host in order:
        hosts.start(host, hosts=3, processes=1)
        time.sleep(1.0)  # the next one comes later, on most machines
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [0, 0, 0], ends


def test_a_host_that_does_not_come_is_named(hosts: Hosts) -> None:
    hosts.start(0, hosts=3, within_s=8.0)
    hosts.start(1, hosts=3)
    (code0, _, said0), (code1, _, said1) = hosts.ends()
    assert (code0, "for host 2 of 3, which did not connect" in said0) == (3, True)
    assert code1 != 0
    assert "host 2 of 3" in said1


def test_nobody_at_the_meeting_place(hosts: Hosts) -> None:
    hosts.start(1, within_s=0.5)
    ((code, _, said),) = hosts.ends()
    assert code == 3
    assert "host 0 was not reached" in said


def test_an_unknown_interface_on_one_host_is_told_to_all(hosts: Hosts) -> None:
    hosts.start(0)
    hosts.start(1, interface="eth77")
    ends = hosts.ends()
    assert [code for code, _, _ in ends] == [2, 2]
    assert all("has no network device 'eth77'" in said for _, _, said in ends)


def test_strangers_at_the_meeting_place_are_ignored(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start(0, processes=1)

    def knock() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", hosts._port), timeout=5) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return True
        except ConnectionRefusedError:
            return False

    eventually(knock)
    hosts.start(1, processes=1)
    assert [code for code, _, _ in hosts.ends()] == [0, 0]


# Over gloo, out of memory, and in the laboratory


@pytest.mark.parametrize("how", ["none", "kill"])
def test_what_gloo_says_of_a_dead_peer_is_no_cause(tmp_path: Path, how: str) -> None:
    argv = (sys.executable, str(HERE / "launch_gloo_worker.py"), how)
    outcome = launch_here(LaunchRequest(argv=argv, processes=2, rundir=tmp_path, limits=LIMITS, threads=1))
    if how == "none":
        assert outcome == RunEnd(exit_code=0)
        return
    assert outcome.blame is not None
    first, collateral = outcome.blame.first, outcome.blame.collateral
    assert (first.rank, first.exit_code, first.op, first.sequence) == (1, -9, "all_reduce", 2)
    assert [(f.rank, f.kind, f.by_us) for f in collateral] == [(0, "RuntimeError", False)]


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group with 150 MiB."""
    v1 = (MEMORY / "memory.limit_in_bytes").exists()
    group = (MEMORY if v1 else Path("/sys/fs/cgroup")) / f"gossamer-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a memory control group: {error}")
    try:
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(150 << 20))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"needs the memory controller: {error}")
    yield group
    eventually(lambda: _removed(group))


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_a_lack_of_memory_is_told_from_a_kill(tmp_path: Path, little_memory: Path) -> None:
    command = [sys.executable, str(HERE / "launch_local_run.py"), str(tmp_path), "0.02", "6", "oom"]
    inside = ["sh", "-c", f'echo $$ >{little_memory}/cgroup.procs && exec "$@"', "sh", *command]
    ended = subprocess.run(inside, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    said = " ".join(ended.stderr.replace("|", " ").split())
    assert "first failing rank 1 on host" in said
    assert "killed by the kernel for lack of memory" in said
    assert "with a limit of 150 MiB" in said


@pytest.mark.lab
@pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))
def test_hosts_in_the_laboratory_find_the_device_between_them(tmp_path: Path) -> None:
    with Lab(LabTopology(2, rate_bytes_per_s=12.5e6)) as lab:
        processes = []
        for host in (0, 1):
            given = {"host": host, "address": lab.address(0), "port": 29400, "runs": str(tmp_path / str(host))}
            argv = [sys.executable, str(HERE / "launch_host.py"), json.dumps(given)]
            processes.append(lab.spawn(host, argv, stdout=subprocess.PIPE))
        outs = [process.communicate(timeout=40)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    for host, out in enumerate(outs):
        assert f"offset={2 * host}, ranks=4, address='{lab.address(0)}'" in out
        assert f"interface='{DEVICE}'" in out


@pytest.mark.lab
@pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))
def test_a_cut_link_ends_both_sides(tmp_path: Path) -> None:
    with Lab(LabTopology(2, rate_bytes_per_s=12.5e6)) as lab:
        processes = []
        for host in (0, 1):
            given = {"host": host, "address": lab.address(0), "port": 29400, "runs": str(tmp_path / str(host))}
            worker = {"worker": ["0.05", "100000", "none"], "processes": 1, "settle_s": 0.5}
            argv = [sys.executable, str(HERE / "launch_host.py"), json.dumps({**given, **worker})]
            processes.append(lab.spawn(host, argv, stdout=subprocess.PIPE))
        assert processes[0].stdout is not None
        while processes[0].stdout.readline() != b"step 0\n":
            assert processes[0].poll() is None
        lab.cut(1)
        outs = [process.communicate(timeout=40)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [3, 3]
    assert all("the network to it is cut" in " ".join(out.replace("|", " ").split()) for out in outs)
