"""Launching over ssh: a stand-in for ssh runs each host's command here, in another folder and a clean environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gossamer.launch import launch_hosts
from gossamer.process.spawn import process_state
from gossamer.spec.errors import BadInput

HERE = Path(__file__).parent
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -o) shift 2;; *) shift;; esac; done
host=$1; shift
echo "$host $*" >>LOG
case $host in down*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;; esac
cd /
exec env -i PATH=/usr/bin:/bin TMPDIR=FOLDER WHO=$host SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" sh -c "$*"
"""
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m gossamer" ]; then shift 2; exec REAL HOST "$@"; fi
if [ "$1" = "-" ] && [ "$WHO" = OLD ]; then REAL "$@" | sed 's/"torch": "[^"]*"/"torch": "1.0"/'; exit; fi
exec REAL "$@"
"""


class Site:
    """A folder with the stand-ins, in front of PATH."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.log = tmp_path, tmp_path / "ssh.log"
        self.python = str(tmp_path / "python")
        (tmp_path / "tmp").mkdir()
        self.script("ssh", SSH.replace("LOG", str(self.log)).replace("FOLDER", str(tmp_path / "tmp")))
        text = PYTHON.replace("REAL", sys.executable).replace("HOST", str(HERE / "launch_host.py"))
        self.script("python", text.replace("OLD", "old"))
        self.log.touch()
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def script(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def config(self, **given: object) -> str:
        return json.dumps({"host": 0, "runs": str(self.path / "runs-{host}"), "processes": 1, **given})

    def launch(
        self, hosts: list[str], *, say: list[str] | None = None, paths: tuple[str, ...] = (), **given: object
    ) -> int:
        heard = [] if say is None else say
        files = {"run.json": self.config(**given)}
        return launch_hosts(hosts, ["{files}/run.json"], files=files, paths=paths, python=self.python, say=heard.append)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_two_hosts(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.launch(["a", "me@b"]) == 0
    out = capfd.readouterr().out
    assert "step 5" in out, "host 0's output is passed on"
    assert out.count("MEETING") == 1
    assert "ranks=2" in out
    assert (site.path / "runs-1/r/logs/rank-00001.log").exists()
    assert [line.split()[0] for line in site.log.read_text().splitlines()].count("me@b") == 2, "one look, one launch"
    assert not list((site.path / "tmp").glob("gossamer-*")), "nothing of the launch stays on a host"


def test_a_failure_has_one_exit_code(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.launch(["a", "b"], worker=["0.02", "6", "raise"]) == 3
    assert "RuntimeError: the matrix is singular" in capfd.readouterr().out


def test_hosts_that_cannot_run_it_are_listed(site: Site) -> None:
    with pytest.raises(BadInput) as caught:
        site.launch(["a", "down1", "old"], paths=("/usr", "no/such/*.txt"))
    text = str(caught.value)
    rows = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert "the versions of torch must be equal on all hosts" in text
    assert "no no/such/*.txt" in rows["a"]
    assert "cannot be reached: ssh: connect to host down1 port 22: Connection refused" in rows["down1"]
    assert " 1.0 " in rows["old"]
    assert len(site.log.read_text().splitlines()) == 3, "nothing was started"


def test_a_python_that_is_not_there(site: Site) -> None:
    site.python = "/no/such/python"
    with pytest.raises(BadInput, match="cannot run /no/such/python"):
        site.launch(["a"])


def test_a_host_twice(site: Site) -> None:
    with pytest.raises(BadInput, match="every host once, got a"):
        site.launch(["a", "b", "a"])


def test_a_host_that_fails_before_the_meeting_ends_the_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.launch.remote_hosts._PATIENCE_S", 0.5)
    text = (site.path / "python").read_text()
    broken = 'if [ "$1 $2 $WHO" = "-m gossamer b" ]; then echo "no licence" >&2; exit 9; fi\n'
    site.script("python", text.replace("#!/bin/sh\n", "#!/bin/sh\n" + broken))
    said: list[str] = []
    assert site.launch(["a", "b"], say=said) == 3
    assert any("host b: exit code 9\nno licence" in line for line in said)


PROGRAM = """
import sys
from gossamer.launch import launch_hosts
sys.exit(launch_hosts(["a", "b"], ["{files}/run.json"], files={"run.json": sys.argv[1]}, python=sys.argv[2]))
"""


@pytest.fixture
def command(site: Site) -> subprocess.Popen[str]:
    config = site.config(worker=["0.05", "100000", "none", f"at={site.path}"])
    argv = [sys.executable, "-c", PROGRAM, config, site.python]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("MEETING")
    assert process.stdout.readline() == "step 0\n"
    return process


def test_ctrl_c_stops_all_hosts_and_saves(command: subprocess.Popen[str]) -> None:
    os.killpg(command.pid, signal.SIGINT)
    out, _ = command.communicate(timeout=30)
    assert command.returncode == 4
    assert "stopped, with a checkpoint" in out


def test_a_killed_launch_leaves_nobody_on_any_host(command: subprocess.Popen[str], site: Site) -> None:
    assert len(_marked(f"at={site.path}")) == 2
    command.kill()
    command.communicate()
    deadline_s = time.monotonic() + 30
    while _marked(f"at={site.path}") or _marked(str(HERE / "launch_host.py"), of=str(site.path)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _marked(mark: str, *, of: str = "") -> set[int]:
    """Living processes that have `mark` among their arguments, and `of` in one."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        is_ours = mark.encode() in line.split(b"\0") and of.encode() in line
        if is_ours and process_state(int(folder.name)) not in ("Z", ""):
            found.add(int(folder.name))
    return found
