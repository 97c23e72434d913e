"""`methods`, `config`, `doctor`, and the reference pages: what the code says about itself."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.cli import doctor, main
from gossamer.run import resources
from gossamer.run.resources import cores, memory, peak_bytes
from gossamer.settings import load
from gossamer.settings.catalog import categories
from gossamer.spec import extras as known
from gossamer.spec.config import RunConfig
from gossamer.spec.extras import extra_with, extras, version_of

ROOMS = categories()
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak as /proc says it")
def test_the_peak_of_a_process_is_not_that_of_the_one_which_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process begins with the `ru_maxrss` of its parent: here of one of a petabyte."""
    usage = SimpleNamespace(ru_maxrss=1 << 40)
    monkeypatch.setattr(resources, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage))
    assert 1 << 20 < peak_bytes() < 1 << 45


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_read_from_its_source_is_the_room_itself(name: str) -> None:
    room = importlib.import_module(f"gossamer.{name.replace('/', '.')}").REGISTRY
    page = ROOMS[name]
    assert tuple(page.methods) == room.names()
    assert page.base == room.base.__name__
    for method in page.methods.values():
        fields = dataclasses.fields(room.type(method.name))
        assert [p.name for p in method.parameters] == [f.name for f in fields if f.init]
        required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        assert [p.name for p in method.parameters if p.default is None] == required or method.is_


@pytest.mark.parametrize("name", ROOMS)
def test_every_room_and_method_says_what_it_is(name: str) -> None:
    assert ROOMS[name].summary and ROOMS[name].methods
    assert all(method.summary for method in ROOMS[name].methods.values())


def test_methods_lists_explains_and_answers_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: " in out for name in ROOMS)
    assert main(["methods", "optimizer.lr_schedule"]) == 0
    assert "cosine" in capsys.readouterr().out
    assert main(["methods", "exchange", "dense"]) == 0
    assert "mean = sum_i w_i x_i" in capsys.readouterr().out
    assert main(["methods", "optimizer", "adamw", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["name"] == "adamw" and "lr" in [p["name"] for p in data["parameters"]] and "Equations" in data["doc"]


def test_config_show_prints_a_configuration_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "train.batch=8"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path / "shown.yaml").config == load(None, ["train.batch=8"]).config
    assert main(["config", "show", str(tmp_path / "shown.yaml"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    lines = (tmp_path / "shown.yaml").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if line.startswith("  batch: 8"))
    assert data["config"]["train"]["batch"] == 8 and data["origin"]["train.batch"].endswith(f"shown.yaml:{place}")


def test_config_check_builds_the_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {optimizer: {adamw: {lr: 1e-3}}}\n")
    assert main(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["set"] == 1
    file.write_text("train: {optimizer: {adamw: {lr: fast}}}\n")
    assert main(["config", "check", str(file)]) == 2
    assert f"{file}:1: train.optimizer.adamw.lr: wanted a number, got 'fast'" in capsys.readouterr().err


def test_config_check_finds_all_keys_that_nothing_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("plan:\n  cuts: [0, 1]\n  adapt_every: 20\n")
    assert main(["config", "check", str(file)]) == 2
    said = capsys.readouterr().err
    assert "2 mistakes:" in said and f"{file}:2: plan.cuts: wanted a model in 2 or more pipeline stages" in said
    assert f"{file}:3: plan.adapt_every" in said
    assert main(["config", "check", str(file), "plan.mesh.pipe=2", "plan.adapt=bcrs"]) == 0


def test_config_schema_is_one_json_object_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"].keys() == RunConfig.model_fields.keys()
    assert main(["config", "schema", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == schema


@pytest.mark.slow
def test_the_doctor_tries_the_wire(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["wire (gloo)"]["level"] == "ok"
    assert found["torch"]["said"] == version_of("torch")
    assert {"python", "cores", "memory", "threads", "cache", "runs", "GPU", "laboratory", "[hf]"} <= set(found)


def test_a_doctor_that_finds_something_bad_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_wire", lambda: doctor.Diagnosis("wire (gloo)", doctor.BAD, "no network"))
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "RED     wire (gloo)" in out and doctor.install("hf") in out and "must be put right" in out


def test_a_doctor_without_extras_does_not_send_to_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_wire", lambda: doctor.Diagnosis("wire (gloo)", doctor.OK, "fine"))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\n\nReady. Try: gossamer demo\n")
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "transformers" else "1")
    assert main(["doctor"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "demo" in last and last.endswith(doctor.install("hf")) and "Try:" not in last


def test_hints_to_install_name_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own note of where the package came from decides; an index is never asked for its name."""
    said: dict[str, Any] = {}

    class Installed:
        requires = known.metadata.requires("gossamer")

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(said) if said else None

    monkeypatch.setattr(known.metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr(known.shutil, "which", lambda name: str(Path(sys.executable).parent / name))
    checkout = tmp_path / "my checkout"
    checkout.mkdir()
    found = {f"{name}{limits}" for name, limits in known._requirements()["hf"].items()}
    command, do, *packages = shlex.split(known.install("hf"))
    assert (command, do, set(packages)) == ("pip", "install", found) and any(
        p.startswith("transformers") and ">=5" in p for p in found
    )
    said.update(url=checkout.as_uri(), dir_info={"editable": True})
    assert shlex.split(known.install("hf")) == ["pip", "install", "-e", f"{checkout}[hf]"]
    said.update(dir_info={})
    assert shlex.split(known.install("hf")) == ["pip", "install", f"{checkout}[hf]"]
    checkout.rmdir()
    assert set(shlex.split(known.install("hf"))[2:]) == found, "a folder that is gone"
    said.update(url="https://example.org/gossamer.git", vcs_info={"vcs": "git", "commit_id": "abc"})
    wanted = "gossamer[hf] @ git+https://example.org/gossamer.git@abc"
    assert shlex.split(known.install("hf")) == ["pip", "install", wanted]
    monkeypatch.setattr(known.shutil, "which", lambda name: "/usr/bin/pip")
    assert shlex.split(known.install("hf"))[:3] == [sys.executable, "-m", "pip"]


def test_a_wire_that_does_not_work_is_named_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert doctor._wire().level == doctor.BAD
    monkeypatch.setattr("sys.executable", "/bin/cat")  # waits for what never comes... or refuses its arguments
    assert doctor._wire().level == doctor.BAD


def test_this_machine_has_cores_and_memory() -> None:
    count, _ = cores()
    total, free = memory()
    assert count > 0 and 0 < free <= total


def test_the_extras_are_those_of_the_package() -> None:
    assert {"hf", "parquet", "tensorboard", "wandb", "mlflow", "trackio"} <= set(extras())
    assert (extra_with("transformers"), extra_with("pyarrow.lib"), extra_with("torch")) == ("hf", "parquet", None)


def test_the_reference_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.stale() == [], "these pages of docs/reference are stale: make docs"
