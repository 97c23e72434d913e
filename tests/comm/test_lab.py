"""The laboratory, on real namespaces: what it promises is measured as a ratio inside one laboratory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.netlab import Lab, LabTopology, LinkEvent, PairRate, lab_unavailable, standing
from gossamer.spec.errors import BadInput, RunFailed

pytestmark = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]

MBIT = 1e6 / 8
HOST = [sys.executable, "-I", str(Path(__file__).with_name("lab_host.py"))]


@pytest.fixture(autouse=True)
def nothing_left():
    before = links()
    yield
    assert not [prefix for prefix in standing() if prefix.startswith(f"gsm{os.getpid()}x")]
    assert links() <= before


def links():
    return set(Path("/sys/class/net").iterdir())


def start_transfer(lab, source, target, count, *, port=7000):
    server = lab.spawn(target, [*HOST, "serve", str(port), "1"])
    client = lab.spawn(source, [*HOST, "send", lab.address(target), str(port), str(count)], stdout=subprocess.PIPE)
    return server, client


def finish_transfer(server, client):
    said = client.communicate(timeout=60)[0].decode()
    assert (client.returncode, server.wait(timeout=60)) == (0, 0), said
    return float(said)


def seconds(lab, source, target, count):
    """How long `count` bytes take; both ends check that they arrived whole."""
    return finish_transfer(*start_transfer(lab, source, target, count))


def test_pair_and_link_rates_hold_in_proportion():
    topology = LabTopology(3, rate_bytes_per_s=40 * MBIT, exceptions=(PairRate(0, 2, 10 * MBIT),))
    with Lab(topology) as lab:
        fast, back, slow = seconds(lab, 0, 1, 2_560_000), seconds(lab, 2, 0, 2_560_000), seconds(lab, 0, 2, 1_280_000)
    assert slow * 2 / fast == pytest.approx(4, rel=0.15)
    assert back / fast == pytest.approx(1, rel=0.15)  # the exception is for one direction


def test_islands_share_their_uplink():
    topology = LabTopology(4, rate_bytes_per_s=80 * MBIT, islands=(2, 2), between_bytes_per_s=20 * MBIT)
    with Lab(topology) as lab:
        inside, across = seconds(lab, 0, 1, 5_120_000), seconds(lab, 0, 2, 2_560_000)
        before = lab.counters()["island0"][0]
        both = [start_transfer(lab, source, source + 2, 1_280_000) for source in (0, 1)]
        shared = max(finish_transfer(*pair) for pair in both)
        crossed = lab.counters()["island0"][0] - before
    assert across * 2 / inside == pytest.approx(4, rel=0.15)
    assert shared / across == pytest.approx(1, rel=0.25)  # half the bytes each, together at the uplink's rate
    assert 1 < crossed / 2_560_000 < 1.02


def test_counters_exceed_the_payload_by_headers_only():
    count = 2_560_000
    with Lab(LabTopology(2, rate_bytes_per_s=100 * MBIT)) as lab:
        assert lab.counters() == {"h0": (0, 0), "h1": (0, 0)}, "a silent laboratory sends nothing"
        seconds(lab, 0, 1, count)
        counters, pairs = lab.counters(), lab.pairs()
    sent, answered = counters["h0"]
    assert 1 < sent / count < 1.02 and answered / count < 0.02
    assert counters["h1"] == (answered, sent)
    assert 1514 / 1448 < pairs[0, 1] / count < 1514 / 1448 + 0.005, "every 1448 bytes carry 66 of headers"


def test_slow_and_heal_while_it_stands():
    with Lab(LabTopology(2, rate_bytes_per_s=40 * MBIT)) as lab:
        before = seconds(lab, 0, 1, 1_280_000)
        lab.slow(1, 10 * MBIT)
        slowed = seconds(lab, 0, 1, 640_000)
        lab.heal(1)
        lab.slow(0, 20 * MBIT, to=1)
        pair = seconds(lab, 0, 1, 640_000)
        lab.heal(0, to=1)
        healed = seconds(lab, 0, 1, 1_280_000)
    assert slowed * 2 / before == pytest.approx(4, rel=0.2)
    assert pair * 2 / before == pytest.approx(2, rel=0.2)
    assert healed / before == pytest.approx(1, rel=0.2)


def test_cut_loses_everything_and_heal_lets_it_go_on():
    with Lab(LabTopology(3, rate_bytes_per_s=20 * MBIT)) as lab:
        pair = start_transfer(lab, 0, 1, 1_280_000)
        while lab.counters()["h1"][1] < 100_000:
            assert pair[1].poll() is None
        lab.cut(1)
        arrived = lab.pairs()[0, 1]
        while lab.counters()["h0"][0] < 10_000 + arrived:  # the sender does not know, and goes on
            assert pair[1].poll() is None
        seconds(lab, 2, 0, 640_000)  # other links are as they were
        assert lab.pairs()[0, 1] == arrived, "nothing arrives over a cut link"
        assert pair[1].poll() is None
        lab.heal(1)
        finish_transfer(*pair)


def test_changes_happen_during_a_run():
    with Lab(LabTopology(2)) as lab:
        script = [*HOST, "send", lab.address(1), "7000", "25600"]
        server = lab.spawn(1, [*HOST, "serve", "7000", "2"])
        changes = (LinkEvent(0.0, "cut", 0, 1), LinkEvent(0.3, "heal", 0, 1))
        said = []
        assert lab.run(script, output=lambda host, line: said.append((host, float(line))), changes=changes) == (0, 0)
        assert server.wait(timeout=10) == 0
        with pytest.raises(BadInput, match="0 to 1, got 7"):
            lab.run(["true"], changes=(LinkEvent(0.0, "cut", 7),))
    assert sorted(host for host, _ in said) == [0, 1]


def test_delay_adds_to_the_round_trip_and_keeps_the_bytes():
    trips = []
    for delay_s in (0.0, 0.02):
        with Lab(LabTopology(2, rate_bytes_per_s=100 * MBIT, delay_s=delay_s)) as lab:
            server = lab.spawn(1, [*HOST, "echo", "7001"])
            client = lab.spawn(0, [*HOST, "ping", lab.address(1), "7001"], stdout=subprocess.PIPE)
            trips.append(float(client.communicate(timeout=60)[0]))
            assert server.wait(timeout=10) == 0
            seconds(lab, 0, 1, 1_280_000)
    assert trips[1] >= 0.04, "20 ms there and 20 ms back"
    assert trips[0] < trips[1] / 2


def test_the_memory_limit_kills_and_says_so():
    code = "import os; x = b'x' * (200 * 2**20 if os.environ['RANK'] == '1' else 1)"
    with Lab(LabTopology(2, memory_bytes=(64 * 2**20,))) as lab:
        assert lab.run([sys.executable, "-I", "-c", code]) == (0, -9)
        assert list(lab.killed_for_memory()) == [1]


def test_shares_of_the_processor_are_as_asked():
    with Lab(LabTopology(2, cpu=(0.5, 0.25))) as lab:
        measured = max((lab.calibrate() for _ in range(2)), key=sum)  # the machine may have been busy
        assert lab.cores == (0.5, 0.25)
    assert measured[0] / measured[1] == pytest.approx(2, rel=0.25)
    assert all(real < granted * 1.15 for real, granted in zip(measured, (0.5, 0.25), strict=True))


def test_every_rank_finds_its_environment():
    said = {}
    code = "import os; print(*(os.environ[k] for k in "
    code += "('RANK','WORLD_SIZE','LOCAL_RANK','MASTER_ADDR','GLOO_SOCKET_IFNAME',"
    code += "'GOSSAMER_NODE_RANK','GOSSAMER_NNODES','GOSSAMER_RDZV_ENDPOINT','MINE')))"
    with Lab(LabTopology(2)) as lab:
        lab.run([sys.executable, "-I", "-c", code], env=lambda host: {"MINE": f"m{host}"}, output=said.__setitem__)
    assert said == {
        0: "0 2 0 10.77.0.1 eth0 0 2 10.77.0.1:29400 m0",
        1: "1 2 0 10.77.0.1 eth0 1 2 10.77.0.1:29400 m1",
    }


def test_run_hands_on_output_and_ends_in_order():
    lines, ended = [], []
    script = 'printf "a\\nno end"; if [ $RANK = 0 ]; then sleep 0.3; fi; exit $((RANK + 3))'
    with Lab(LabTopology(2)) as lab:
        codes = lab.run(
            ["sh", "-c", script],
            output=lambda host, line: lines.append((host, line)),
            exited=lambda host, code: ended.append((host, code)),
        )
    assert codes == (3, 4) and ended == [(1, 4), (0, 3)]
    assert sorted(lines) == [(0, "a"), (0, "no end"), (1, "a"), (1, "no end")]


def test_wrong_use_is_said():
    with Lab(LabTopology(2)) as lab:
        for wrong in (lambda: lab.cut(2), lambda: lab.slow(0, 5.0), lambda: lab.heal(1, to=1), lambda: lab.address(-1)):
            with pytest.raises(BadInput, match=r"wanted .*, got"):
                wrong()
        with pytest.raises(BadInput, match="no program is called 'no-such-program'"):
            lab.run(["no-such-program"])
        with pytest.raises(BadInput, match="no command"):
            lab.run([])
    with pytest.raises(RunFailed, match="not up"):
        lab.counters()
