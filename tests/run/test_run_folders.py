"""The run's folder, where hosts are started from another machine: they have the name that this one gave it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gossamer.api import launcher, started_run
from gossamer.api.launcher import RUN_FOLDER, Launcher
from gossamer.api.started_run import train_command
from gossamer.launch.rendezvous_config import Node
from gossamer.settings import Resolved, load
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.view.run_directory import RunDirectory

NAMED = re.compile(r"\d{8}-\d{6}-mine")


class Hosts:
    """What hosts would do with the order that they get: they find the folder of the run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.orders = folder, list[dict[str, Any]]()

    def start(self, hosts: Any, argv: list[str], **order: Any) -> int:
        self.orders.append({"hosts": hosts, "argv": argv, **order})
        config = self.config()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in order["env"].items():
                patch.setenv(name, value)
            resume = "auto" if "--resume" in argv else None
            directory, resuming = started_run.run_directory(Resolved.of(config), resume)
        self.orders[-1] |= {"run": directory.name, "resuming": resuming}
        if not resuming:
            directory.keep(config, {})
        return 0

    def config(self) -> RunConfig:
        return RunConfig.model_validate(yaml.safe_load(self.orders[-1]["files"]["run.yaml"]))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_FOLDER, raising=False)
    found = Hosts(tmp_path)
    monkeypatch.setattr(launcher, "launch_hosts", found.start)
    monkeypatch.setattr(
        launcher, "launch_ray", lambda nodes, processes, argv, **order: found.start(nodes, argv, **order)
    )
    return found


def written(**machines: Any) -> Resolved:
    return load(None, given={"run": {"name": "mine"}, "machines": machines})


@pytest.mark.parametrize("on", ["ssh", "machines.hosts", "ray"])
def test_the_folder_has_one_time_stamp_wherever_it_is_made(hosts: Hosts, on: str) -> None:
    if on == "ssh":
        train_command(written(), hosts=["a", "b"])
    elif on == "ray":
        train_command(written(), ray_nodes=2)
    else:
        train_command(written(hosts=["a", "b"]))
    (order,) = hosts.orders
    assert NAMED.fullmatch(order["run"]) and not order["resuming"]
    assert [run.name for run in Path("runs").iterdir()] == [order["run"]], "one folder, where the disk is one"
    assert hosts.config().run.name == "mine"
    assert hosts.config().machines.hosts == ([] if on == "ray" else ["a", "b"]), "a resume starts where it ran"


def test_a_run_over_ssh_is_found_again(hosts: Hosts) -> None:
    train_command(written(), hosts=["a", "b"])
    train_command(written(), hosts=["a", "b"], resume="auto")
    first, second = hosts.orders
    assert second["resuming"] and second["run"] == first["run"]
    train_command(written(), hosts=["a", "c"], resume="auto")
    assert not hosts.orders[-1]["resuming"], "other hosts have disks of their own"


def test_a_host_with_another_disk_makes_the_same_folder(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    (hosts.folder / "far").mkdir()
    start = hosts.start

    def elsewhere(names: Any, argv: list[str], **order: Any) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(hosts.folder / "far")
            return start(names, argv, **order)

    monkeypatch.setattr(launcher, "launch_hosts", elsewhere)
    train_command(written(), hosts=["a", "b"])
    assert [run.name for run in (hosts.folder / "far/runs").iterdir()] == [hosts.orders[0]["run"]]
    assert not list((hosts.folder / "runs").iterdir()), "here nothing was trained"
    assert RunDirectory(hosts.folder / "far/runs" / hosts.orders[0]["run"]).config().run.name == "mine"
    assert RUN_FOLDER not in os.environ


def test_a_host_resumes_with_the_settings_of_the_launching_machine(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gossamer resume RUN train.steps=9` there: a disk of the host's own holds the settings of the first start."""
    directory = RunDirectory(hosts.folder / "runs/20261127-000000-mine")
    directory.keep(written().config, {})
    monkeypatch.setenv(RUN_FOLDER, directory.name)
    monkeypatch.setattr(Launcher, "met", lambda self, node, prepare: (self.directory, bool(prepare(self.directory))))
    given = load(None, given={"run": {"name": "mine"}, "train": {"steps": 9}})
    train_command(given, node=Node(1, 2, "127.0.0.1", 29400), resume="auto")
    assert directory.config() == given.config


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "lab"])
def test_a_run_of_the_same_name_is_resumed_or_refused(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """Also where srun starts a supervisor on every node, and where the laboratory has named the folder."""
    named = {"srun": {"SLURM_PROCID": "0"}, "torchrun": {"RANK": "0", "WORLD_SIZE": "2"}}
    named["lab"] = {**named["torchrun"], "GOSSAMER_RUN_NAME": "mine"}
    for name, value in named[launcher].items():
        monkeypatch.setenv(name, value)
    given = load(None, given={"run": {} if launcher == "lab" else {"name": "mine"}})
    other = load(None, given={"run": {} if launcher == "lab" else {"name": "mine"}, "train": {"steps": 9}})
    directory = RunDirectory(Path("runs/mine"))
    (hosts.folder / "runs/mine").mkdir(parents=True)
    (hosts.folder / "runs/mine/slurm.out").write_text("mine")
    for resume in (None, "auto"):
        assert started_run.run_directory(given, resume) == (directory, False)
    directory.keep(given.config, {})
    assert started_run.run_directory(given, "auto") == (directory, True)
    with pytest.raises(BadInput, match=r"got runs/mine, which is there already: set run.name to another name, or give"):
        started_run.run_directory(given, None)
    with pytest.raises(BadInput, match="which is there already with other settings"):
        started_run.run_directory(other, "auto")
