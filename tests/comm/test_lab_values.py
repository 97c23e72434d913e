"""The laboratory's values and lines: what needs neither root nor Linux."""

import math
import re
import struct
import subprocess
import sys

import pytest

from gossamer.netlab import LabTopology, LinkEvent, PairRate, cgroup, delay, hosts, lab_unavailable, requirements
from gossamer.netlab.traffic_shaping import LinkRates, peer_of
from gossamer.spec.errors import BadInput

WRONG = [
    ({"hosts": 0}, "hosts: wanted 1 to 200 hosts, got 0"),
    ({"hosts": 201}, "got 201"),
    ({"rate_bytes_per_s": 0.0}, "rate: wanted a rate of at least 8 kbit/s, got 0 bit/s"),
    ({"rate_bytes_per_s": math.nan}, "got nan"),
    ({"islands": (2, 1)}, r"islands: wanted island sizes that sum to 4 hosts, got 2\+1 = 3"),
    ({"islands": (4, 0)}, r"got 4\+0"),
    ({"between_bytes_per_s": 1e6}, "inter-rate: .* at least two islands"),
    ({"delay_s": -0.001}, "delay: .* got -1 ms"),
    ({"delay_s": math.nan}, "got nan ms"),
    ({"cpu": (1.0, 0.5)}, r"cpu: wanted 4 positive numbers .* got \[1.0, 0.5\]"),
    ({"cpu": (1.0, 1.0, 1.0, 0.0)}, "an idle core of a host without a quota would speed up"),
    ({"memory_bytes": (2**30, 2**30)}, "memory: wanted one memory limit or 4"),
    ({"memory_bytes": (1000,)}, r"at least 4 MiB, got \[1000\] bytes"),
    ({"exceptions": (PairRate(0, 4, 1e6),)}, "exceptions: .* hosts of 0 to 3, got 0 and 4"),
    ({"exceptions": (PairRate(1, 1, 1e6),)}, "got 1 and 1"),
    ({"exceptions": (PairRate(0, 1, 1.0),)}, "exceptions: wanted a rate"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_an_impossible_topology_is_refused_with_the_numbers(fields, said):
    with pytest.raises(BadInput, match=said):
        LabTopology(**{"hosts": 4, **fields})


def test_islands_are_in_host_order():
    topology = LabTopology(4, islands=(1, 3), memory_bytes=(2**30,))
    assert [topology.island(host) for host in range(4)] == [0, 1, 1, 1]
    assert topology.memory() == (2**30,) * 4 and LabTopology(3).sizes() == (3,)


def test_the_slowest_of_link_pair_and_uplink_counts():
    shape = LinkRates(
        LabTopology(4, rate_bytes_per_s=8e6, islands=(2, 2), between_bytes_per_s=4e6, exceptions=(PairRate(0, 1, 6e6),))
    )
    assert [shape.pair_bytes_per_s(0, to) for to in (1, 2)] == [6e6, 4e6] and shape.pair_bytes_per_s(1, 0) == 8e6
    slowed = shape.slowed(1, 1e6, None)
    assert slowed.pair_bytes_per_s(0, 1) == slowed.pair_bytes_per_s(1, 2) == 1e6 and slowed.healed(1, None) == shape
    assert shape.slowed(0, 2e6, 2).severed(3, None).healed(0, 2).healed(3, None) == shape


@pytest.mark.parametrize(
    "shape", [LinkRates(LabTopology(5, rate_bytes_per_s=1e6)), LinkRates(LabTopology(2)), LinkRates(LabTopology(200))]
)
def test_no_class_may_exceed_its_link_nor_the_promises_together(shape):
    for lines in (shape.egress_lines("eth0", 0), shape.ingress_lines(0)):
        classes = [re.search(r"parent (\S+) classid (\S+) htb rate (\d+)bit ceil (\d+)bit", line) for line in lines]
        found = [match.groups() for match in classes if match]
        (link,) = [int(rate) for parent, _, rate, _ in found if parent == "1:"]
        leaves = [(handle, int(rate), int(ceil)) for parent, handle, rate, ceil in found if parent == "1:1"]
        assert sum(rate for _, rate, _ in leaves) <= link and max(ceil for *_, ceil in leaves) <= link
        assert [peer for handle, *_ in leaves if (peer := peer_of(handle)) is not None] == shape.others(0)


def test_a_cut_changes_one_queue_per_direction_and_nothing_else():
    shape = LinkRates(LabTopology(3, rate_bytes_per_s=1e6))
    cut = shape.severed(0, 1)
    for host, other in ((0, 1), (1, 0)):
        before, after = shape.ingress_lines(host, verb="change"), cut.ingress_lines(host, verb="change")
        (changed,) = [line for line in after if line not in before]
        assert f"parent 1:{0x10 + other:x} " in changed and changed.endswith("bfifo limit 1")
    assert cut.ingress_lines(2) == shape.ingress_lines(2)
    assert cut.egress_lines("eth0", 0) == shape.egress_lines("eth0", 0), "the sender is not told"


def test_changes_as_people_write_them():
    assert LinkEvent.parse("10s slow h1 5mbit") == LinkEvent(10.0, "slow", 1, None, 625_000.0)
    assert LinkEvent.parse("0.5s cut h1-h22") == LinkEvent(0.5, "cut", 1, 22)
    assert LinkEvent.parse(" 30s heal h0 ") == LinkEvent(30.0, "heal", 0)


@pytest.mark.parametrize(
    "text", ["", "10 cut h1", "10s slow h1", "10s cut h1 5mbit", "10s melt h1", "10s cut 1", "1s slow h1 fast"]
)
def test_a_change_that_cannot_be_read_is_refused(text):
    with pytest.raises(BadInput, match="event: wanted"):
        LinkEvent.parse(text)


def test_cores_are_scaled_together_and_never_up():
    assert cgroup.cores_granted((1.0, 0.5), present=2) == (1.0, 0.5)
    assert cgroup.cores_granted((4.0, 2.0, 2.0), present=5) == pytest.approx((2.0, 1.0, 1.0))
    assert cgroup.cores_granted((), present=2) == ()
    said = r"host 1 would get 0.100 of a core \(asked 0.1 of 1.1, 2 cores present\), and .* smallest quota is 1 ms"
    with pytest.raises(BadInput, match=said):
        cgroup.cores_granted((1.0, 0.1), present=2)


@pytest.mark.parametrize("version", [1, 2])
def test_limits_reach_the_cgroup_of_either_version(tmp_path, version):
    kind = f"cgroup2 {tmp_path} cgroup2 rw 0 0" if version == 2 else f"cgroup {tmp_path} cgroup rw,cpu,memory 0 0"
    mounts = tmp_path / "mounts"
    mounts.write_text(f"proc /proc proc rw 0 0\n{kind}\n")
    for folder in (tmp_path, tmp_path / "gsm1x0"):
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.controllers").write_text("cpu memory\n")
        (folder / "cgroup.subtree_control").write_text("memory\n")
    cpu = cgroup.find("cpu", mounts=mounts)
    assert cpu == cgroup.Mount("cpu", tmp_path, version)
    cgroup.make(cpu, "gsm1x0", [cgroup.quota_files(cores, version) for cores in (0.5, 1.5)])
    names = {path.name: path.read_text() for path in (tmp_path / "gsm1x0" / "h1").iterdir()}
    assert names == (
        {"cpu.max": "7500 5000"} if version == 2 else {"cpu.cfs_period_us": "5000", "cpu.cfs_quota_us": "7500"}
    )
    assert ("+cpu" in (tmp_path / "cgroup.subtree_control").read_text()) == (version == 2)


def test_a_machine_without_the_controller_is_told_which(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    (tmp_path / "mounts").write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    with pytest.raises(BadInput, match=r"memory: .* needs the cgroup controller 'memory'"):
        cgroup.find("memory", mounts=tmp_path / "mounts")


def test_the_delay_line_moves_large_segments_as_they_are():
    header = struct.Struct("=BBHHHH")
    body = bytes([0x45]) + bytes(15) + bytes([10, 77, 0, 3]) + b"payload"
    own = bytes([2, 0x67, 0x73, 0x6D, 0, 1])
    frame = delay.ethernet_frame(header.pack(1, 1, 52, 1448, 20, 16) + body, own)
    assert header.unpack_from(frame) == (1, 1, 66, 1448, 34, 16), "offsets count from the frame's start"
    assert frame[10:] == own[:5] + bytes([3]) + own + b"\x08\x00" + body
    plain = delay.ethernet_frame(header.pack(0, 0, 0, 0, 0, 0) + body, own)
    assert header.unpack_from(plain) == (0, 0, 0, 0, 0, 0)
    assert delay.ethernet_frame(header.pack(0, 0, 0, 0, 0, 0) + bytes([0x60]) + body, own) is None


def test_what_is_missing_is_said(monkeypatch):
    def reason():
        requirements.lab_unavailable.cache_clear()
        return requirements.lab_unavailable()

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "needs Linux" in reason()
    if sys.platform.startswith("linux"):
        with monkeypatch.context() as patch:
            patch.setattr("os.geteuid", lambda: 1000)
            assert "needs root" in reason() and "user 1000" in reason()
            patch.setattr("os.geteuid", lambda: 0)
            patch.setattr("shutil.which", lambda name: None if name == "tc" else name)
            assert reason() == "the laboratory needs tc: install iproute2"
    requirements.lab_unavailable.cache_clear()
    assert lab_unavailable() is None or "the laboratory needs" in lab_unavailable()


def test_a_closed_pipe_does_not_end_the_wait():
    said = []
    process = subprocess.Popen(["sh", "-c", "echo a; exec >&- 2>&-; sleep 0.2; exit 3"], stdout=subprocess.PIPE)
    assert hosts.follow([process], output=lambda host, line: said.append(line)) == [3] and said == ["a"]
