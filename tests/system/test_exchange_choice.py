"""`exchange: auto` between real hosts: what it chooses on a slow line, and what it does when a line gets slower."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gossamer.netlab import Lab, LabTopology, lab_unavailable
from system.command import GOSSAMER, SIZES, Place, eventually, records

pytestmark = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]

MBIT = 1e6 / 8
MODEL = {"hf": "llama", "config": {**SIZES, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}}


def started(lab: Lab, config: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The same command on every host, as `gossamer lab run` starts it."""
    argv = ["env", "-C", str(folder), *GOSSAMER, "train", str(config)]
    return [lab.spawn(host, argv, stdout=subprocess.DEVNULL) for host in range(lab.topology.hosts)]


def seen(run: Path, kind: str) -> list[dict]:
    """The records so far; none before the run began."""
    return records(run, kind) if (run / "records.jsonl").exists() else []


@pytest.mark.nightly
def test_a_slow_line_is_compressed_and_a_slower_one_is_found_out(place: Place) -> None:
    """At 20 Mbit/s some of the gradients are encoded; at a tenth of it the links are measured again and it says so."""
    config = place.config(
        "slow",
        model=MODEL,
        train={"steps": 400, "batch": 4, "checkpoint_every": 0, "evaluate_every": 0},
        plan={"lossy": True},
        run={"name": "slow"},
    )
    run = place.folder / "runs" / "slow"
    with Lab(LabTopology(2, rate_bytes_per_s=20 * MBIT)) as lab:
        hosts = started(lab, config, place.folder)
        try:
            eventually(lambda: len(seen(run, "step")) >= 45, "45 steps", within_s=120)
            plan = yaml.safe_load((run / "plan.yaml").read_text())
            assert "error_feedback" in str(plan["exchange"]), plan["reasons"]
            *trials, choice = (e["message"] for e in records(run, "event") if e["step"] == 0)
            assert trials and all(said.startswith("exchange: tried ") for said in trials)
            assert choice.startswith("exchange: ") and " exposed (links: " in choice
            for host in range(2):
                lab.slow(host, 2 * MBIT)
            eventually(
                lambda: any("the links have drifted" in e["message"] for e in records(run, "event")),
                "a word about the links",
                within_s=150,
            )
            after = yaml.safe_load((run / "plan.yaml").read_text())
            assert after["forecast"]["exposed_s"] != plan["forecast"]["exposed_s"]
            count = len(records(run, "step"))
            eventually(lambda: len(records(run, "step")) > count + 2, "training to go on", within_s=60)
        finally:
            for host in hosts:
                host.terminate()
            codes = [host.wait(timeout=60) for host in hosts]
    assert set(codes) <= {0, 4}


@pytest.mark.nightly
def test_without_permission_the_gain_is_told(place: Place) -> None:
    config = place.config(
        "exact",
        model=MODEL,
        train={"steps": 3, "batch": 4, "checkpoint_every": 0, "evaluate_every": 0},
        run={"name": "exact"},
    )
    lab = ("lab", "run", "--hosts", "2", "--rate", "10mbit", "--json")
    place.good(*lab, "--", sys.executable, "-m", "gossamer", "train", config)
    run = place.folder / "runs" / "exact"
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert "error_feedback" not in str(plan["exchange"])
    assert "plan.lossy: true would take" in plan["reasons"]["exchange"]
    assert len(records(run, "step")) == 3


@pytest.mark.nightly
def test_islands_part_where_the_line_is_too_slow_for_every_step(place: Place) -> None:
    """Two islands of two hosts: what goes between them in a round fits the line, what a step sends does not."""
    config = place.config(
        "apart",
        model=MODEL,
        train={"steps": 80, "batch": 4, "checkpoint_every": 0, "evaluate_every": 0},
        plan={"lossy": True, "sync": "auto"},
        run={"name": "apart"},
    )
    lab = ("lab", "run", "--hosts", "4", "--islands", "2x2", "--rate", "1gbit", "--inter-rate", "2mbit", "--json")
    place.good(*lab, "--", sys.executable, "-m", "gossamer", "train", config)
    run = place.folder / "runs" / "apart"
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert "diloco" in plan["sync"], plan["reasons"]
    assert [sorted(i) for i in plan["islands"]] == [[0, 1], [2, 3]]
    assert plan["reasons"]["sync"].startswith("islands synchronize every ")
    assert any(e["message"].startswith("sync: islands synchronize every ") for e in records(run, "event"))
    steps = records(run, "step")
    assert len(steps) == 80
    start = plan["sync"]["diloco"]["warmup_steps"]
    assert start == 8
    across = [sum(n for link, n in s["wire_bytes"].items() if link in ("0>2", "0>3")) for s in steps]
    assert max(across[start : start + 2]) < 0.2 * min(across[:start])  # nothing but votes until a fragment leaves
