"""Four real hosts on shaped links run the unchanged command and train what one process trains."""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from gossamer.netlab import lab_unavailable
from system.command import SIZES, Place, losses, records

pytestmark = [pytest.mark.lab, pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))]


@pytest.mark.nightly
def test_four_hosts_train_what_one_process_trains(place: Place) -> None:
    sections = {
        "model": {"hf": "llama", "config": {**SIZES, "hidden_size": 128, "intermediate_size": 256}},
        "train": {"steps": 10, "batch": 8, "checkpoint_every": 0},
        "plan": {"exchange": "dense"},  # nothing is measured first, so the interfaces count the steps alone
    }
    alone = place.config("alone", **sections, run={"directory": "alone"})
    together = place.config("together", **sections)  # without a name: the laboratory gives all hosts one
    place.good("train", alone)
    lab = ("lab", "run", "--hosts", "4", "--rate", "100mbit", "--json")
    about = place.good(*lab, "--", sys.executable, "-m", "gossamer", "train", together).last()
    assert about["exit_codes"] == [0, 0, 0, 0]

    (run,) = (place.folder / "runs").glob("*-gsm*")
    assert losses(run) == pytest.approx(losses(place.runs("alone")[0]), rel=1e-5)
    forecast = yaml.safe_load((run / "plan.yaml").read_text())["forecast"]["wire_bytes"]
    mine = {link: count for link, count in forecast.items() if link.startswith("0>")}
    steps = records(run, "step")
    assert len(steps) == 10
    assert all(step["wire_bytes"] == mine for step in steps)

    payload = 10 * sum(forecast.values())
    counted = sum(link["tx"] for link in about["bytes_per_link"].values())
    assert payload < counted < 1.02 * payload


def test_one_folder_for_all_hosts_is_the_users_where_he_names_one(place: Place) -> None:
    """GOSSAMER_RUN_NAME as it is set, or one name that all hosts are told."""
    lab = ("lab", "run", "--hosts", "2", "--rate", "100mbit", "--json", "--", "sh", "-c", "echo run=$GOSSAMER_RUN_NAME")
    mine = place.good(*lab, GOSSAMER_RUN_NAME="mine")
    assert (mine.out + mine.err).count("run=mine") == 2
    said = place.good(*lab, GOSSAMER_RUN_NAME="")
    names = re.findall(r"run=(\S+)", said.out + said.err)
    assert len(names) == 2 and names[0] == names[1] and "-gsm" in names[0]
