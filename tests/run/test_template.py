"""Workers as copies of a process that has the imports: each is what a fresh interpreter would be."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gossamer.process import Command, EventLoop, OrphanReaper, Worker
from gossamer.process.spawn import process_state
from gossamer.process.starter import ForkedStarter, FreshStarter, Starter, starter_of
from gossamer.process.template import Template, TemplateLost, can_split

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="templates are of Linux")

# A program that tells what it was given; `said` counts how often its other module was imported.
PROGRAM = """
import atexit, json, os, signal, sys, threading
import shared_imports

def shown(file):
    with open(f"/proc/self/{file}") as words:
        return [word for word in words.read().split(chr(0)) if word and not word.startswith("GOSSAMER_BOX=")]

def seen():
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    handlers = {number.name: str(signal.getsignal(number)) for number in watched}
    return {
        "argv": sys.argv[1:], "name": __name__, "env": dict(os.environ), "folder": os.getcwd(), "path": sys.path[0],
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "parent": os.getppid(), "handlers": handlers,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "stdin": sys.stdin.read(),
        "open": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
        "shown": shown("cmdline"), "variables": sorted(shown("environ")),
        "importer": shared_imports.PID, "pid": os.getpid(), "threads": len(os.listdir("/proc/self/task")),
    }

if __name__ == "__main__":
    if sys.argv[1] == "tell":
        print(json.dumps(seen()))
    elif sys.argv[1] == "wait":
        print("waits", flush=True)
        signal.pause()
    elif sys.argv[1] == "raise":
        raise ValueError("no such thing")
    elif sys.argv[1] == "exit":
        atexit.register(print, "at exit")
        threading.Thread(target=print, args=["a thread's last word"]).start()
        sys.exit(int(sys.argv[2]))
    elif sys.argv[1] == "text":
        sys.exit("said at the end")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shared_imports.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "told.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(folder: Path, *argv: str, rank: int = 0, descriptors: tuple[int, ...] = (), echo: bool = False) -> Command:
    env = {**os.environ, "RANK": str(rank), "MINE": f"of {rank}"}
    command = (sys.executable, "-m", "told", *argv)
    return Command(rank=rank, argv=command, env=env, log=folder / f"log-{rank}", descriptors=descriptors, echo=echo)


def ready(starter: Starter) -> Starter:
    while not starter.is_ready():
        time.sleep(0.01)
    return starter


@contextmanager
def at_work(starter: Starter, *jobs: Command) -> Iterator[list[Worker]]:
    loop, warden = EventLoop(), OrphanReaper()
    workers: list[Worker] = []
    try:
        for one in jobs:
            workers.append(Worker(one, starter=starter, loop=loop, warden=warden))
        starter.close()
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            while worker.poll() is None:
                loop.turn(0.01)
        warden.close()
        loop.close()


def end_of(starter: Starter, *jobs: Command) -> list[tuple[int | None, str]]:
    """Exit code and log of each."""
    with at_work(starter, *jobs) as workers:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.01)
    return [(worker.exit_code, worker.log.read_text()) for worker in workers]


def test_a_copy_is_given_what_a_fresh_interpreter_is_given(program: Path) -> None:
    told: list[dict[str, Any]] = []
    with open(program / "told.py") as handed:
        number = handed.fileno()
        for make in (lambda one: FreshStarter(), lambda one: ready(ForkedStarter(one))):
            one = job(program, "tell", "a", "b c", descriptors=(handed.fileno(),))
            ((code, log),) = end_of(make(one), one)
            assert code == 0, log
            told.append(json.loads(log))
            one.log.unlink()
    fresh, copied = told
    assert fresh.pop("importer") == fresh.pop("pid")
    assert copied.pop("importer") != copied.pop("pid")  # it was imported before
    for one in told:  # the number of the position page's descriptor is whatever was free
        assert one.pop("open") == sorted([0, 1, 2, int(one["env"].pop("GOSSAMER_BOX")), number])
    assert copied == fresh
    assert copied["parent"] == os.getpid()
    assert copied["argv"] == ["tell", "a", "b c"]
    assert copied["env"]["MINE"] == "of 0"


def test_copies_have_their_own_environment_and_share_the_imports(program: Path) -> None:
    jobs = [job(program, "tell", rank=rank) for rank in range(3)]
    ends = end_of(ready(ForkedStarter(jobs[0], ["json"])), *jobs)
    told = [json.loads(log) for _, log in ends]
    assert [one["env"]["MINE"] for one in told] == ["of 0", "of 1", "of 2"]
    assert len({one["importer"] for one in told}) == 1
    assert len({one["pid"] for one in told}) == 3


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["exit", "7"], 7, ["a thread's last word", "at exit"]),
        (["raise"], 1, ["ValueError: no such thing"]),
        (["text"], 1, ["said at the end"]),
    ],
)
def test_a_copy_ends_as_a_fresh_interpreter_does(program: Path, words: list[str], code: int, said: list[str]) -> None:
    one = job(program, *words)
    for starter in (FreshStarter(), ready(ForkedStarter(one))):
        ((ended, log),) = end_of(starter, one)
        assert ended == code
        assert all(text in log for text in said), log
        one.log.unlink()


def test_the_output_of_a_copy_is_echoed(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = job(program, "exit", "0", echo=True)
    ((code, log),) = end_of(ready(ForkedStarter(one)), one)
    assert code == 0
    assert "at exit" in log
    assert "at exit" in capfd.readouterr().out


def test_a_copy_is_killed_as_any_worker(program: Path) -> None:
    one = job(program, "wait")
    with at_work(ready(ForkedStarter(one)), one) as (worker,):
        while "waits" not in worker.log.read_text() or worker.state() != "S":
            time.sleep(0.01)
        worker.signal(signal.SIGTERM)
        while worker.poll() is None:
            time.sleep(0.01)
        assert worker.exit_code == -signal.SIGTERM


def test_what_the_template_cannot_import_a_fresh_interpreter_tells(program: Path) -> None:
    (program / "shared_imports.py").write_text("raise ImportError('it is not there')\n")
    jobs = [job(program, "tell", rank=rank) for rank in range(2)]
    ends = end_of(ready(ForkedStarter(jobs[0])), *jobs)
    assert [code for code, _ in ends] == [1, 1]
    assert all("it is not there" in log for _, log in ends)


def test_workers_do_not_wait_for_a_template_that_is_closed(program: Path) -> None:
    (program / "slow_imports.py").write_text("import time\ntime.sleep(600)\n")
    one = job(program, "tell")
    starter = ForkedStarter(one, ["slow_imports"])
    assert not starter.is_ready()
    ((code, log),) = end_of(starter, one)
    assert code == 0
    assert json.loads(log)["importer"] == json.loads(log)["pid"]


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        ("from threading import *; Thread(target=Event().wait, name='a library', daemon=True).start()", "a library"),
        (
            "from ctypes import *; c = CDLL(None); c.pthread_create(byref(c_ulong()), None, c.pause, None)",
            "native threads: 1",
        ),
        ("LOG = open('of_a_library', 'w')", "of_a_library"),
    ],
    ids=["thread", "native thread", "file"],
)
def test_imports_that_leave_what_no_fork_has_are_not_copied(program: Path, imports: str, said: str) -> None:
    """A thread would be missing in the copies, perhaps with a lock that it holds; an open file would be closed."""
    (program / "busy_imports.py").write_text(imports + "\n")
    one = job(program, "tell")
    ((code, log),) = end_of(ready(ForkedStarter(one, ["busy_imports"])), one)
    why, told = log.splitlines()
    assert code == 0
    assert "each process imports for itself" in why and said in why
    assert json.loads(told)["importer"] == json.loads(told)["pid"]


@pytest.mark.nightly
def test_threads_that_a_library_ends_before_a_fork_do_not_count(program: Path) -> None:
    (program / "told.py").write_text(PROGRAM.replace("import shared_imports", "import numpy, shared_imports"))
    one = job(program, "tell")
    one = replace(one, env={**one.env, "OPENBLAS_NUM_THREADS": "3"})
    ((code, log),) = end_of(ready(ForkedStarter(one)), one)
    assert code == 0, log
    assert json.loads(log)["importer"] != json.loads(log)["pid"]


@pytest.mark.nightly
def test_copies_draw_other_numbers(program: Path) -> None:
    """As interpreters do, each of which asks the system as it starts."""
    (program / "told.py").write_text(
        "import json, multiprocessing, random, numpy\n"
        "print(json.dumps([random.random(), numpy.random.rand(), multiprocessing.current_process().authkey.hex()]))\n"
    )
    jobs = [job(program, "", rank=rank) for rank in range(2)]
    first, second = (json.loads(log.splitlines()[-1]) for _, log in end_of(ready(ForkedStarter(jobs[0])), *jobs))
    assert len(first) == 3 and not set(first) & set(second)


@pytest.mark.nightly
def test_signals_that_were_ignored_stay_so(program: Path) -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        one = job(program, "tell")
        ((_, log),) = end_of(ready(ForkedStarter(one)), one)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert json.loads(log)["handlers"]["SIGHUP"] == str(signal.SIG_IGN)
    assert json.loads(log)["handlers"]["SIGTERM"] == str(signal.SIG_DFL)


def test_nobody_waits_for_a_stopped_template(program: Path) -> None:
    (program / "slow_imports.py").write_text("import time\ntime.sleep(600)\n")
    one = job(program, "tell")
    starter = ForkedStarter(one, ["slow_imports"])
    assert starter._template is not None and not starter.is_ready()
    os.kill(starter._template._pid, signal.SIGSTOP)
    ((code, _),) = end_of(ready(starter), one)
    assert code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("adopts", [0, 1])
def test_a_program_that_adopts_orphans_goes_on_to(program: Path, adopts: int) -> None:
    prctl, found = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(36, adopts, 0, 0, 0)
    try:
        one = job(program, "exit", "0")
        end_of(ready(ForkedStarter(one)), one)
        prctl(37, ctypes.byref(found), 0, 0, 0)
    finally:
        prctl(36, 0, 0, 0, 0)
    assert found.value == adopts


@pytest.mark.nightly
def test_what_hinders_a_copy_before_its_program_is_in_its_log(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(program, "tell")
    starter = ready(ForkedStarter(one))
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such/folder")
    ((code, log),) = end_of(starter, one)
    assert code == 1
    assert "FileNotFoundError" in log and "/no/such/folder" in log


def test_a_program_of_ones_own_is_never_forked(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have set torch's defaults, or registered what is to be done at its exit."""
    assert not can_split(["json"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "gossamer.process._template_main", "5"])
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])
    monkeypatch.setattr("threading.active_count", lambda: 1)
    assert can_split(["json"])
    assert not can_split(["json", "no_such_module"])


def test_a_lost_template_is_said(program: Path) -> None:
    with open(os.devnull, "wb") as log:
        template = Template(["told"], env=os.environ, log=log)
    try:
        os.kill(template._pid, signal.SIGKILL)
        with pytest.raises(TemplateLost, match="has ended"):
            while True:
                template.is_ready()
    finally:
        template.close()


def test_a_template_and_its_copies_die_with_the_supervisor(program: Path) -> None:
    supervisor = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from pathlib import Path
from run.test_template import job, ready
from gossamer.process import EventLoop, OrphanReaper, Worker
from gossamer.process.starter import ForkedStarter
one = job(Path.cwd(), "wait")
starter = ready(ForkedStarter(one))
worker = Worker(one, starter=starter, loop=EventLoop(), warden=OrphanReaper())
print(starter._template._pid, worker.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(process_state(pid) not in ("", "Z") for pid in pids)
        process.kill()
        process.wait()
    deadline_s = time.monotonic() + 30
    while any(process_state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.01)


def test_who_is_copied(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(*jobs: Command) -> type[Starter]:
        starter = starter_of(jobs)
        starter.close()
        return type(starter)

    one = job(program, "tell")
    other = Command(rank=0, argv=("/bin/true",), env={}, log=program / "log")
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert kind(one, one) is ForkedStarter
    assert kind(one) is FreshStarter  # nothing would be shared
    assert kind(other, other) is FreshStarter
    monkeypatch.setenv("GOSSAMER_FRESH_RANKS", "1")
    assert kind(one, one) is FreshStarter
    monkeypatch.delenv("GOSSAMER_FRESH_RANKS")
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/proc/driver/nvidia")
    assert kind(one, one) is FreshStarter
