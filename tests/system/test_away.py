"""A run away from home: sampled, exported and gone on with where neither its text nor its folder is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.cli import main
from gossamer.model.origin import origin_of
from gossamer.settings import anchored, load
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from system.command import SIZES, Place
from system.conftest import Trained

NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
    def forward(self, tokens):
        return self.head(self.embed(tokens))
def make(vocab_size):
    return Net(vocab_size)
"""
KINDS: dict[str, tuple[Any, str]] = {  # the model, and the tokenizer
    "type": ({"hf": "llama", "config": {**SIZES, "vocab_size": 300, "tie_word_embeddings": True}}, "bpe:300"),
    "directory": ({"hf": "base", "config": {"attention_dropout": 0.1}}, "hf:base"),
    "factory": ({"factory": "homely:make"}, "byte"),
}


@pytest.fixture
def home(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus, a model with weights of its own, and a module."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "homely", raising=False)
    Path("homely.py").write_text(NET)
    base = origin_of(ModelSection(hf="llama", config=SIZES))
    with_weights(base, Path("base"))
    return place.folder


def with_weights(origin: Any, folder: Path) -> None:
    from gossamer.data.tokenizer.byte import Bytes
    from gossamer.model.export import export_hf

    export_hf(origin.build(7), origin, Bytes(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))


def trained_here(kind: str) -> Path:
    model, tokenizer = KINDS[kind]
    said = gossamer.train(
        model,
        "text:corpus/*.txt",
        {
            "data": {"tokenizer": tokenizer, "sequence": 32, "validation": 0.3, "cache": "cache"},
            "train": {"steps": 2, "batch": 2, "evaluate_sequences": 2},
            "run": {"display": "quiet"},
        },
    )
    return Path(said["directory"]).absolute()


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_carried_off_gives_what_it_gave_at_home(
    kind: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_here(kind)
    plain = Path(shutil.copytree(run, home / "runs" / "plain"))  # as an earlier version left it: from its text alone
    for name in ("tokenizer", "model"):
        shutil.rmtree(plain / name, ignore_errors=True)
    gossamer.export(plain, "expected/out")
    text = gossamer.sample(plain, "stone ", tokens=12)

    away = Path(shutil.copytree(run, tmp_path / "away" / "run"))
    if kind == "factory":
        shutil.move(home / "homely.py", away.parent)
        monkeypatch.delitem(sys.modules, "homely")
    shutil.move(home, tmp_path / "gone")
    monkeypatch.chdir(away.parent)
    assert gossamer.sample(str(away), "stone ", tokens=12) == text
    said = gossamer.export("run", "out")
    assert content(Path("out")) == content(tmp_path / "gone" / "expected" / "out")
    scope: dict[str, Any] = {"module": None}
    exec("import safetensors.torch, transformers" + ("; import homely" if kind == "factory" else ""), scope)
    exec(said["load"] if kind == "factory" else f"module = {said['load']}", scope)  # it says how it is loaded
    trained, loaded = gossamer.load(away).module.state_dict(), scope["module"].state_dict()
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())


def test_what_is_missing_is_said(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained_here("factory")
    (tmp_path / "else").mkdir()
    shutil.move(home / "homely.py", tmp_path / "homely.py")
    monkeypatch.chdir(tmp_path / "else")
    monkeypatch.delitem(sys.modules, "homely")
    with pytest.raises(
        BadInput, match=r"made by homely:make, and there is no module 'homely' to import \(looked for in"
    ):
        gossamer.load(run)
    monkeypatch.chdir(tmp_path)
    assert gossamer.load(run).step == 2, "a module in the current folder will do"

    torn = Path(shutil.copytree(run, tmp_path / "torn"))
    (torn / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"tokenizer\.json has changed since the run wrote it"):
        gossamer.sample(torn, "a")
    (torn / "tokenizer" / "identity.json").unlink()
    with pytest.raises(BadInput, match="No such file"):
        gossamer.sample(torn, "a")
    shutil.rmtree(torn / "tokenizer")
    config = (torn / "run.yaml").read_text()
    (torn / "run.yaml").write_text(config.replace("tokenizer: byte", "tokenizer: bpe:300"))
    shutil.rmtree(home / "corpus")
    with pytest.raises(BadInput, match=r"contains no tokenizer .*no file matches .*`gossamer resume` there"):
        gossamer.export(torn, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (torn / "run.yaml").write_text(config.replace("steps: 2", "steps: many"))
    with pytest.raises(BadInput, match=r"wanted a configuration of this version in .*train.steps"):
        gossamer.load(torn)


def test_a_module_that_a_program_made_is_filled_by_it(home: Path) -> None:
    module = nn.Sequential(nn.Embedding(257, 4), nn.Linear(4, 257))
    config = {
        "model": {"hf": "llama"},  # not what is trained
        "data": {"sequence": 32, "validation": 0.3, "cache": "cache"},
        "train": {"steps": 2, "batch": 2, "evaluate_sequences": 2, "checkpoint_every": 1},
        "run": {"display": "quiet"},
    }
    run = gossamer.train(module, "text:corpus/*.txt", config)["directory"]
    with pytest.raises(BadInput, match=r"that a Python program built, .*: in that program, call gossamer\.load"):
        gossamer.sample(run, "a")
    other = nn.Sequential(nn.Embedding(257, 4), nn.Linear(4, 257))
    found = gossamer.load(run, other)
    assert found.module is other and torch.equal(other[1].weight, module[1].weight) and found.words().vocabulary == 257
    again = gossamer.train(other.train(), "text:corpus/*.txt", config, resume="auto")
    assert again["directory"] == run, "the same run, at its end already"
    more = {**config, "train": {**config["train"], "steps": 3}}
    assert gossamer.train(other, "text:corpus/*.txt", more, resume="auto")["directory"] != run
    with pytest.raises(BadInput, match="wanted resume="):
        gossamer.train(other, "text:corpus/*.txt", config, resume="run")


def test_a_run_is_resumed_from_another_folder(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained.copy(tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = gossamer.resume("copied", {"train.steps": 7, "data.cache": "mine", "machines.processes": 1})
    assert (said["outcome"], said["steps"]) == ("done", 7)
    assert (tmp_path / "mine").is_dir(), "what is written here is relative to here"
    assert gossamer.load(run).step == 7


def resumes_in(run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from gossamer.job.run_files import folder_of
    from gossamer.view.run_directory import open_run

    monkeypatch.chdir(here)
    return folder_of(open_run(run))


def test_which_folder_relative_paths_are_relative_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.view.run_directory import RunDirectory

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    monkeypatch.chdir(first)
    resolved = load(None)
    RunDirectory(Path("runs/a")).keep(resolved.config, resolved.origin)
    shutil.copytree(first, second)
    assert resumes_in(first / "runs/a", first, monkeypatch) == first
    assert resumes_in(first / "runs/a", tmp_path, monkeypatch) == first, "where it began"
    assert resumes_in(second / "runs/a", second, monkeypatch) == second, "all of it was copied, and we stand there"
    assert resumes_in(second / "runs/a", tmp_path, monkeypatch) == first
    shutil.rmtree(first)
    assert resumes_in(second / "runs/a", tmp_path, monkeypatch) == tmp_path, "all that is left"
    (second / "runs/a/began.json").write_text("[]")
    assert resumes_in(second / "runs/a", tmp_path, monkeypatch) == tmp_path


OVERRIDES: dict[str, Callable[[Path], str]] = {
    "data.source=text:new/*.txt": lambda here: f"text:{here}/new/*.txt",
    "data.source={jsonl: {files: a.jsonl, field: body}}": lambda here: f"{here}/a.jsonl",
    "data.source={text: a.txt}": lambda here: f"{here}/a.txt",
    "data.source=chat:a.jsonl": lambda here: f"chat:{here}/a.jsonl",
    "data.source={chat: {files: a.jsonl, template: own.jinja}}": lambda here: f"{here}/own.jinja",
    "data.source=pairs:a.jsonl": lambda here: f"pairs:{here}/a.jsonl",
    "data.source=hub:base": lambda here: f"hub:{here}/base",
    "data.source=hub:owner/name": lambda here: "hub:owner/name",
    "data.source={hub: {dataset: owner/name, read: {chat: {template: own.jinja}}}}": lambda here: f"{here}/own.jinja",
    "data.source={mixture: {sources: {a: 'text:a.txt'}, weights: {a: 1}}}": lambda here: f"text:{here}/a.txt",
    "data.validation={part: 0.1, a: 'chat:a.jsonl'}": lambda here: f"chat:{here}/a.jsonl",
    "data.tokenizer=bpe:300": lambda here: "bpe:300",
    "data.source=stdlib": lambda here: "stdlib",
    "model.gguf=a.gguf": lambda here: f"{here}/a.gguf",
    "model.hf=llama": lambda here: "llama",
    "model.hf=base": lambda here: f"{here}/base",
    "data.cache=~/c": lambda here: "~/c",
}


@pytest.mark.parametrize("given", OVERRIDES)
def test_paths_of_the_command_line_are_relative_to_where_it_was_given(given: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    resolved = anchored(load(None, [given]), tmp_path)
    key = given.partition("=")[0]
    section, name = key.split(".")
    assert OVERRIDES[given](tmp_path) in str(getattr(getattr(resolved.config, section), name))
    assert "command line" in resolved.origin[key]


def test_paths_of_the_file_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {source: 'text:a.txt', cache: c}")
    resolved = load(tmp_path / "run.yaml", ["train.steps=3"])
    assert anchored(resolved, tmp_path) == resolved


def test_export_says_how_a_model_of_ones_own_is_loaded(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_here("factory")
    capsys.readouterr()
    assert main(["export", str(run), "out", "--to", "hf"]) == 0
    out = capsys.readouterr().out
    assert "from_pretrained" not in out
    assert "module = homely.make(vocab_size=257); safetensors.torch.load_model(module, 'out/model.safetensors')" in out
