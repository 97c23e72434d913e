"""However a laboratory ends, nothing of it stays: no namespace, device, cgroup, process or file."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gossamer.netlab import Lab, LabTopology, cleanup, lab_unavailable, standing, sweep

pytestmark = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]

OWNER = """
import json, sys, time
from gossamer.netlab import Lab, LabTopology
with Lab(LabTopology(2, delay_s=0.001, cpu=(0.5, 0.5), memory_bytes=(2**28,))) as lab:
    for host in range(2):
        lab.spawn(host, ["sh", "-c", "(setsid sleep 1000 &) ; sleep 1000"])
    print(lab.prefix, flush=True)
    time.sleep(1000)
"""


def traces(prefix):
    """Everything that carries the name, and every process in its namespaces."""
    namespaces = [path.name for path in Path("/run/netns").glob(f"{prefix}*")]
    pids = [pid for name in namespaces for pid in in_namespace(name)]
    cgroups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{prefix}")]
    cgroups += [str(path) for path in Path("/sys/fs/cgroup").glob(prefix)]
    return {"namespaces": namespaces, "pids": pids + wardens(prefix), "cgroups": cgroups}


def in_namespace(name):
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


def wardens(prefix):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if prefix.encode() in words and any(word.endswith(b"remains.py") for word in words):
                found.append(int(entry.name))
    return found


def wait_until(condition):
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def owner():
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    prefix = process.stdout.readline().strip()
    before = traces(prefix)
    assert len(before["namespaces"]) == 3 and before["cgroups"]
    assert wait_until(lambda: len(traces(prefix)["pids"]) >= 7), "two lines, two commands with a child each, the warden"
    yield process, prefix
    process.kill()
    process.wait()
    process.stdout.close()
    sweep()


def assert_gone(prefix, pids):
    assert wait_until(lambda: prefix not in standing())
    assert wait_until(lambda: not any(traces(prefix).values())), traces(prefix)
    assert wait_until(lambda: not any(cleanup.started(pid) for pid in pids))
    assert prefix not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_owner_leaves_nothing(owner, number):
    process, prefix = owner
    pids = traces(prefix)["pids"]
    process.send_signal(number)
    process.wait(timeout=20)
    assert_gone(prefix, pids)


def test_the_next_laboratory_removes_what_owner_and_warden_left(owner):
    process, prefix = owner
    pids = traces(prefix)["pids"]
    for warden in wardens(prefix):
        os.kill(warden, signal.SIGKILL)
    process.kill()
    process.wait()
    assert prefix in standing() and traces(prefix)["namespaces"], "nobody was there to clean up"
    with Lab(LabTopology(1)):
        assert prefix not in standing()
    assert_gone(prefix, pids)


def test_a_laboratory_in_use_is_not_swept(owner):
    process, prefix = owner
    assert prefix not in sweep()
    assert process.poll() is None and prefix in standing() and len(traces(prefix)["pids"]) >= 7


def test_an_error_inside_the_block_leaves_nothing():
    with pytest.raises(ZeroDivisionError), Lab(LabTopology(2, delay_s=0.001)) as lab:
        prefix, sleeper = lab.prefix, lab.spawn(1, ["sleep", "1000"])
        pids = traces(prefix)["pids"]
        assert 1 // 0
    assert sleeper.returncode == -signal.SIGKILL and len(pids) >= 3
    assert_gone(prefix, pids)


def test_a_failure_while_building_leaves_nothing(monkeypatch):
    before = set(standing())
    monkeypatch.setattr("gossamer.netlab.network.lead_through_line", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), Lab(LabTopology(2, delay_s=0.001)):
        raise AssertionError("it must not stand")
    assert set(standing()) == before and not list(Path("/run/netns").glob(f"gsm{os.getpid()}x*"))


def test_a_process_that_took_the_owners_number_does_not_protect_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cleanup, "folder", lambda: tmp_path)
    prefix = cleanup.claim([])
    assert cleanup.sweep() == () and cleanup.standing() == (prefix,)
    state = json.loads((tmp_path / f"{prefix}.json").read_text())
    (tmp_path / f"{prefix}.json").write_text(json.dumps({**state, "started": state["started"] - 1}))
    assert cleanup.sweep() == (prefix,) and cleanup.standing() == ()


def test_threads_of_one_process_claim_names_of_their_own():
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: cleanup.claim(()), range(64))]
    try:
        assert len(set(found)) == 64 and set(found) <= set(standing())
        assert not [*cleanup.folder().glob(".gsm*")]
    finally:
        for prefix in found:
            cleanup.remove(prefix)
