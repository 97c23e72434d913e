"""Defaults, file and command line: what wins, what is read as what, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gossamer.settings import Resolved, load, override, reload, schema, show
from gossamer.settings.describe import leaves
from gossamer.settings.resolve import value_at
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.view.run_directory import RunDirectory

FILE = """\
# a run
train:
  batch: 16
  optimizer:
    adamw:
      lr: 1e-3
      weight_decay: 0.2
data: {sequence: 64, source: "text:a/*.txt"}
run:
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(FILE)
    return tmp_path / "run.yaml"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(file: Path) -> None:
    config = load(file, ["train.batch=32", "train.steps=7"]).config
    assert (config.train.batch, config.train.steps, config.data.sequence, config.train.seed) == (32, 7, 64, 0)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "train:\nrun: {}\n"])
def test_a_file_without_values_is_all_defaults(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert load(tmp_path / "run.yaml").config == RunConfig() == load(None).config


VALUES = {
    "train.max_grad_norm=1e-4": 1e-4,
    "train.max_grad_norm=1E2": 100.0,
    "train.steps=1e3": 1000,
    "train.steps='12'": 12,
    "data.source=*.txt": "*.txt",
    "data.source=text:x/*.txt": "text:x/*.txt",
    "data.source={jsonl: {files: a, field: b}}": {"jsonl": {"files": "a", "field": "b"}},
    "run.name=7": "7",
    "run.name=1e5": "1e5",
    "run.name=2026-01-01": "2026-01-01",
    "run.name=null": None,
    "run.name=a=b": "a=b",
    "run.directory=on": "on",
    "machines.hosts=[a, b]": ["a", "b"],
    "model.compile=yes": True,
    "plan.batch_fractions=[0.6, 0.4]": [0.6, 0.4],
    "plan.mesh.replica=auto": "auto",
    "model.config={initializer_range: 2e-2, layers: [1, 2]}": {"initializer_range": 0.02, "layers": [1, 2]},
    "model.config.a.b=3": {"a": {"b": 3}},
    "plan.exchange.error_feedback.topk.fraction=0.01": {"error_feedback": {"topk": {"fraction": 0.01}}},
    "plan.exchange=[[bias, all, dense], ['.*', all, {topk: {fraction: 1e-2}}]]": [
        ("bias", "all", "dense"),
        (".*", "all", {"topk": {"fraction": 0.01}}),
    ],
    "train.optimizer.sgd.lr=0.1": {"sgd": {"lr": 0.1}},
    "train.optimizer.adamw.eps=1e-6": {"adamw": {"lr": 3e-4, "eps": 1e-6}},
    "--train.steps=5": 5,
}


@pytest.mark.parametrize("given", VALUES)
def test_what_is_written_on_the_command_line_is_read_as_meant(given: str) -> None:
    resolved = load(None, [given])
    path = given.removeprefix("--").partition("=")[0]
    key = next(k for k, _ in leaves() if path == k or path.startswith(f"{k}."))
    assert value_at(resolved.config, key) == VALUES[given]
    assert resolved.origin[key].endswith("command line")


def test_overrides_reach_into_what_the_file_says(file: Path) -> None:
    config = load(file, ["train.optimizer.adamw.lr=0.01", "data={pack: false}"]).config
    assert config.train.optimizer == {"adamw": {"lr": 0.01, "weight_decay": 0.2}}
    assert (config.data.sequence, config.data.pack) == (64, False)


def test_the_last_override_wins_and_the_file_is_left_alone(file: Path) -> None:
    assert load(file, ["train.batch=1", "train.batch=2"]).config.train.batch == 2
    assert file.read_text() == FILE


def test_every_value_has_an_origin(file: Path) -> None:
    resolved = load(file, ["train.steps=7", "train.optimizer.adamw.lr=0.01", "plan.sync.every_step={}"])
    expected = {key: "default" for key, _ in leaves()}
    expected |= {
        "train.batch": f"{file}:3",
        "train.optimizer": f"{file}:4, command line",
        "data.sequence": f"{file}:8",
        "data.source": f"{file}:8",
        "train.steps": "command line",
        "plan.sync": "default, command line",
    }
    assert resolved.origin == expected


def test_another_method_on_the_command_line_owes_nothing_to_the_file(file: Path) -> None:
    resolved = load(file, ["train.optimizer.sgd.momentum=0.9"])
    assert resolved.config.train.optimizer == {"sgd": {"momentum": 0.9}}
    assert resolved.origin["train.optimizer"] == "command line"


def test_merge_keys_and_aliases_of_yaml_work(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model:\n  config: &a {x: 1}\nplan: {pipeline_schedule: {single_stage: {<<: *a, y: 2}}}\n"
    )
    config = load(tmp_path / "run.yaml").config
    assert config.plan.pipeline_schedule == {"single_stage": {"x": 1, "y": 2}}


def test_toml_says_the_same_as_yaml(file: Path, tmp_path: Path) -> None:
    text = "[train]\nbatch = 16\n\n[train.optimizer.adamw]\nlr = 1e-3\nweight_decay = 0.2\n\n[data]\nsequence = 64\n"
    (tmp_path / "run.toml").write_text(text + 'source = "text:a/*.txt"\n')
    resolved = load(tmp_path / "run.toml")
    assert resolved.config == load(file).config
    assert resolved.origin["train.batch"] == f"{tmp_path}/run.toml:2"
    assert resolved.origin["train.optimizer"] == f"{tmp_path}/run.toml:4"


ODD: dict[str, Any] = {
    "model": {"config": {"text": "1e5", "number": 1e-9, "none": None, "list": [True, "no", "~"], "dash": "- a: #b"}},
    "data": {"source": "text:*.txt"},
    "run": {"name": "2026-01-01", "directory": "a b: c"},
    "train": {"max_grad_norm": float("inf")},
}


def test_what_show_prints_is_read_back_equal(tmp_path: Path) -> None:
    resolved = load(None, given=ODD)
    (tmp_path / "run.yaml").write_text(show(resolved))
    assert load(tmp_path / "run.yaml").config == resolved.config
    assert yaml.safe_load(show(resolved))["train"]["batch"] == 64


def test_show_says_where_each_value_came_from(file: Path) -> None:
    lines = show(load(file, ["train.steps=7"])).splitlines()
    assert [line.split() for line in lines if line.strip().startswith(("steps:", "batch:", "seed:"))] == [
        ["steps:", "7", "#", "command", "line"],
        ["batch:", "16", "#", f"{file}:3"],
        ["seed:", "0", "#", "default"],
    ]


def test_a_configuration_made_in_python_knows_what_was_set() -> None:
    resolved = Resolved.of(RunConfig.model_validate({"train": {"batch": 8}}))
    assert {k for k, where in resolved.origin.items() if where == "python"} == {"train.batch"}
    planned = resolved.replace("plan.mesh.replica", 2, origin="planner: two processes")
    assert planned.config.plan.mesh.replica == 2
    assert planned.origin["plan.mesh.replica"] == "planner: two processes"
    with pytest.raises(BadInput, match=r"planner: plan\.mesh\.replica: wanted a whole number"):
        resolved.replace("plan.mesh.replica", 0, origin="planner")


def test_an_earlier_run_is_read_back_with_its_origins(file: Path, tmp_path: Path) -> None:
    first = load(file, ["train.steps=7"])
    directory = RunDirectory(tmp_path / "run-1")
    directory.keep(first.config, first.origin)
    again = reload(directory.path)
    assert (again.config, dict(again.origin)) == (first.config, dict(first.origin))
    more = reload(directory.path, ["train.batch=4"])
    assert more.config == override(first.config, ["train.batch=4"])
    assert more.origin == {**first.origin, "train.batch": "command line"}
    with pytest.raises(BadInput, match="run directory"):
        reload(tmp_path / "nothing")


def test_the_schema_describes_every_key() -> None:
    text = json.dumps(schema())
    for key, field in leaves():
        assert f'"{key.rpartition(".")[2]}"' in text
        assert field.description is None or json.dumps(field.description) in text
    assert schema()["additionalProperties"] is False
