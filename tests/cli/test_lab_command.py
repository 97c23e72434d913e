"""`gossamer lab` as a user calls it."""

import json
import signal
import subprocess
import sys

import pytest

from gossamer.cli.lab import LabRequest, app
from gossamer.netlab import lab_unavailable, standing
from gossamer.spec.errors import BadInput

needs_lab = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]
PROGRAM = [sys.executable, "-c", "import sys; from gossamer.cli.lab import app; app(sys.argv[1:])"]


def lab(*words):
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_becomes_a_topology():
    wanted = LabRequest(
        hosts=4, rate="100mbit", islands="2x2", inter_rate="50mbit", delay=20, cpu="1,.5,1,1", memory="2gib"
    )
    topology = wanted.topology()
    assert (topology.rate_bytes_per_s, topology.between_bytes_per_s) == (12.5e6, 6.25e6)
    assert (topology.islands, topology.delay_s, topology.cpu) == ((2, 2), 0.02, (1.0, 0.5, 1.0, 1.0))
    assert topology.memory() == (2**31,) * 4
    assert LabRequest(hosts=4, islands="3,1", memory="1gib,512mib,1g,1.5G").topology().memory_bytes[1] == 2**29


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rate": "fast"}, "rate: wanted a rate such as 100mbit"),
        ({"inter_rate": "5"}, "inter-rate: wanted a rate"),
        ({"islands": "2y2"}, "islands: wanted islands such as 2x2 or 3,1"),
        ({"islands": "2x2"}, "islands: wanted island sizes that sum to 2 hosts"),
        ({"cpu": "1,x"}, "cpu: wanted numbers"),
        ({"cpu": "1"}, "cpu: wanted 2 positive numbers"),
        ({"memory": "lots"}, "memory: wanted memory such as"),
    ],
)
def test_what_cannot_be_read_is_refused(fields, said):
    with pytest.raises(BadInput, match=said):
        LabRequest(**fields).topology()


def test_a_missing_command_or_wrong_change_starts_nothing():
    with pytest.raises(BadInput, match="event: wanted a change"):
        app(["run", "--event", "soon", "--", "true"], result_action="return_value")
    if lab_unavailable() is None:
        with pytest.raises(BadInput, match="no command"):
            app(["run"], result_action="return_value")


class TestStanding:
    pytestmark = needs_lab

    def test_run_tags_lines_and_exits_like_the_first_failing_host(self):
        script = "echo $RANK of $WORLD_SIZE; [ $RANK = 1 ] || sleep 3; exit $((5 - RANK))"
        done = lab("run", "--hosts", "2", "--rate", "100mbit", "--cpu", "0.4,0.4", "--json", "--", "sh", "-c", script)
        assert done.returncode == 4, done.stderr
        lines = done.stdout.splitlines()
        assert {"[h0] 0 of 2", "[h1] 1 of 2"} <= set(lines) and "real cores (granted)" in lines[0]
        about = json.loads(lines[-1])
        assert about["exit_codes"] == [5, 4] and about["first_failed"] == 1
        assert len(about["cpu_shares"]) == 2 and about["bytes_per_link"] == {
            h: {"tx": 0, "rx": 0} for h in ("h0", "h1")
        }

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_is_passed_on_once(self, number):
        script = "trap 'echo saved; exit 4' INT TERM; echo ready; while :; do sleep 0.05; done"
        with subprocess.Popen(
            [*PROGRAM, "run", "--", "sh", "-c", script], stdout=subprocess.PIPE, text=True
        ) as process:
            said = [process.stdout.readline() for _ in range(3)]
            process.send_signal(number)
            rest = process.stdout.read()
        assert sum("ready" in line for line in said) == 2 and rest.count("saved") == 2 and process.returncode == 4

    def test_up_stands_until_interrupted_and_down_ends_it_by_name(self):
        with subprocess.Popen([*PROGRAM, "up", "--hosts", "2"], stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(4)]
            prefix = lines[0].removeprefix("[lab] ").partition(":")[0]
            assert f"nsenter --net=/run/netns/{prefix}h1 bash" in lines[2] and prefix in standing()
            assert f"still standing, in use: {prefix}" in lab("down").stdout
            assert f"removed: {prefix}" in lab("down", prefix).stdout
            process.stdout.read()
        assert process.returncode == 0 and prefix not in standing()
        with pytest.raises(BadInput, match="wanted the name of a running emulated network, got 'gsm0x0'"):
            app(["down", "gsm0x0"], result_action="return_value")

    def test_up_and_down_end_with_one_json_object(self):
        with subprocess.Popen([*PROGRAM, "up", "--hosts", "2", "--json"], stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(5)]
            about = json.loads(lines[4])  # while it stands: scripts read on from here
            prefix = about["laboratory"]
            assert prefix in lines[0] and prefix in standing() and about["cpu_shares"] is None
            assert [host["enter"] in line for host, line in zip(about["hosts"], lines[1:3], strict=True)] == [True] * 2
            left = json.loads(lab("down", "--json").stdout.splitlines()[-1])
            assert prefix in left["standing"] and prefix not in left["removed"]
            gone = json.loads(lab("down", prefix, "--json").stdout.splitlines()[-1])
            assert prefix in gone["removed"] and prefix not in gone["standing"]
            assert process.stdout.read() == "", "nothing after the object"
        assert process.returncode == 0
