"""Everything that can be wrong with a configuration: one clear message with place, key, wanted and got."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.settings import Resolved, check, load
from gossamer.settings.methods import check_methods, check_names
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput


def said(folder: Path, text: str, *overrides: str, name: str = "run.yaml") -> str:
    """The message for a file of this text, with the folder's path taken out."""
    (folder / name).write_text(text, "utf-8")
    with pytest.raises(BadInput) as error:
        load(folder / name, overrides)
    return str(error.value).replace(f"{folder}/", "")


MISTAKES = {
    "unknown key": ("train:\n  bach: 3", "run.yaml:2: train.bach: there is no such key: did you mean 'batch'?"),
    "unknown section": ("trian: {steps: 3}", "run.yaml:1: trian: there is no such key: did you mean 'train' or"),
    "key of another section": ("steps: 3", "run.yaml:1: steps: there is no such key: did you mean 'train.steps'?"),
    "deep unknown key": ("plan:\n  mesh:\n    repicla: 2", "run.yaml:3: plan.mesh.repicla: there is no such key: did"),
    "not like any key": ("data:\n  xyzzy: 1", "data.xyzzy: there is no such key: known: cache, config, factory"),
    "text for a number": (
        "train: {steps: many}",
        "train.steps: wanted a whole number >= 1, got 'many': write such a value, or",
    ),
    "below the bound": (
        "train: {batch: 0}",
        "whole number >= 1 (sequences per step, over all replicas), got 0",
    ),
    "a half": ("train: {steps: 1.5}", "run.yaml:1: train.steps: wanted a whole number >= 1, got 1.5"),
    "true for a number": ("train:\n  steps: true", "run.yaml:2: train.steps: wanted a whole number >= 1, got true"),
    "not a number": ("train: {max_grad_norm: .nan}", "train.max_grad_norm: wanted a number >= 0"),
    "number out of range": ("data: {validation: 1}", "wanted a fraction of the training text >= 0 and < 1"),
    "auto misspelt": ("train: {accumulate: atuo}", "wanted a whole number >= 1 or auto (micro-batches per replica"),
    "none of the choices": ("train: {precision: fp8}", "wanted one of auto, fp32, bf16, fp16 (type the forward and"),
    "nothing": ("train:\n  batch:", "run.yaml:2: train.batch: wanted a whole number >= 1"),
    "number for text": ("model: {factory: 7}", 'got 7: quote it: "7"'),
    "text for a switch": ("model: {compile: maybe}", "model.compile: wanted true or false (run the forward"),
    "list for a method": ("train: {optimizer: [adamw]}", "wanted a method: a name or {name: {parameter: value}}"),
    "bad entry of a list": ("plan: {batch_fractions: [0.5, 0]}", "wanted a list [...] of numbers > 0 or auto"),
    "value for a section": ("machines: 2", "wanted keys (processes, hosts, islands"),
    "two models": ("model:\n  hf: llama\n  gguf: a.gguf", "run.yaml:1: model: give one of hf, gguf, factory"),
    "a key twice": ("train:\n  seed: 1\n  steps: 5\n  seed: 2", "run.yaml:4: seed is written twice (first in line 2)"),
    "a section twice": ("train: {}\ndata: {}\ntrain: {}", "run.yaml:3: train is written twice (first in line 1)"),
    "half a letter": (
        'train: {sample_prompt: "a\\ud800"}',
        "run.yaml:1: train.sample_prompt: wanted text, got 'a\\ud800', in which some bytes are not UTF-8: save the",
    ),
    "half a letter in a method": (
        'data: {source: {text: "\\udcff"}}',
        "run.yaml:1: data.source: wanted text, got '\\udcff'",
    ),
    "half a letter in a list": ('machines: {hosts: [a, "\\udcff"]}', "machines.hosts: wanted text, got '\\udcff'"),
    "half a letter in a key": ('model: {config: {"\\udcff": 1}}', "model.config: wanted text, got '\\udcff'"),
    "a list": ("- train", "run.yaml:1: wanted keys such as `train:`, got a list"),
    "a word": ("hello", "run.yaml:1: wanted keys such as `train:`, got only 'hello'"),
    "a tab": ("train:\n\tsteps: 1", "run.yaml:2: this is not YAML"),
    "an open bracket": ("plan: {batch_fractions: [1, 2", "this is not YAML"),
    "two documents": ("train: {}\n---\ndata: {}", "run.yaml:2: this is not YAML"),
    "an unknown tag": ("train: !!python/object:os.system {}", "this is not YAML: could not determine a constructor"),
    "an alias to itself": ("model: {config: &a {b: *a}}", "this contains itself"),
    "a control character": ("train: {}\n\x00", "run.yaml is not YAML"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_told_with_its_place(what: str, tmp_path: Path) -> None:
    text, wanted = MISTAKES[what]
    assert wanted in said(tmp_path, text)


def test_the_message_has_one_line_for_each_mistake_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "data:\n  sequence: 1\ntrain:\n  bach: 3\n  steps: true\nbatch: 3\n"
    lines = said(tmp_path, text, "train.max_grad_norm=-1", "nonsense").splitlines()
    assert lines[0] == "6 mistakes:"
    assert [line.split(": ")[0] for line in lines[1:5]] == [f"run.yaml:{n}" for n in (2, 4, 5, 6)]
    assert all(line.startswith("command line: ") for line in lines[5:])


def test_a_single_mistake_has_no_headline(tmp_path: Path) -> None:
    assert said(tmp_path, "train: {bach: 3}").count("\n") == 0


def test_a_missing_file_offers_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").touch()
    with pytest.raises(BadInput, match=r"there is no file .*/run\.yaml: did you mean 'runs\.yaml'\?"):
        load(tmp_path / "run.yaml")
    with pytest.raises(BadInput, match=r"the folder .*/nowhere does not exist"):
        load(tmp_path / "nowhere" / "run.yaml")
    with pytest.raises(BadInput, match="the configuration file comes first, then key=value"):
        load(Path("train.batch=3"))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        load(tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"train: \xff")
    with pytest.raises(BadInput, match=r"not UTF-8 text \(byte 7\)"):
        load(tmp_path / "run.yaml")
    if os.geteuid() != 0:  # root may read anything
        (tmp_path / "run.yaml").chmod(0)
        with pytest.raises(BadInput, match="Permission denied"):
            load(tmp_path / "run.yaml")


OVERRIDES = {
    "nonsense": "wanted key=value such as train.batch=32, got 'nonsense'",
    "=3": "wanted key=value",
    "train..batch=3": "wanted key=value",
    "train.bach=3": "command line: train.bach: there is no such key: did you mean 'batch'?",
    "trian.batch=3": "command line: trian: there is no such key: did you mean 'train' or",
    "batch=3": "did you mean 'train.batch'?",
    "train.batch=-3": "command line: train.batch: wanted a whole number >= 1",
    "train.batch=": "got nothing",
    "train.steps.warm=3": "train.steps has no keys below it, it takes a whole number >= 1: write train.steps=1000",
    "train=5": "wanted keys (steps, batch",
    "plan.batch_fractions=[1": "is not YAML",
    "machines.hosts=a": "wanted a list [...] of text",
}


@pytest.mark.parametrize("given", OVERRIDES)
def test_a_bad_override_is_told(given: str) -> None:
    with pytest.raises(BadInput) as error:
        load(None, [given])
    assert OVERRIDES[given] in str(error.value)


def test_an_override_below_a_section_that_is_none_is_told_with_the_file(tmp_path: Path) -> None:
    text = said(tmp_path, "train: 5", "train.batch=3")
    assert "run.yaml:1: train: wanted keys" in text and "train.batch cannot be set" in text


def test_a_broken_toml_is_told(tmp_path: Path) -> None:
    assert "run.toml is not TOML" in said(tmp_path, "train = {", name="run.toml")
    assert "run.toml:3: train.bach: there is" in said(tmp_path, "\n[train]\nbach = 3\n", name="run.toml")


def test_values_from_python_say_so() -> None:
    with pytest.raises(BadInput, match=r"python: train\.bach: there is no such key"):
        load(None, given={"train": {"bach": 3}})
    with pytest.raises(BadInput, match=r"^train\.bach: there is no such key"):
        check({"train": {"bach": 3}})
    with pytest.raises(BadInput, match=r"wanted a whole number >= 1, got <object object"):
        check({"train": {"steps": object()}})


METHODS = {
    "train.optimizer=adamv": "command line: train.optimizer: ",
    "train.optimizer.adamw.learning_rate=1": "command line: train.optimizer.adamw",
    "train.lr_schedule=cosin": "did you mean 'cosine'?",
    "plan.exchange=dens": "did you mean 'dense'?",
    "plan.sync=evry_step": "did you mean 'every_step'?",
    "run.trackers=[tensorbord]": "command line: run.trackers.0: ",
    "data.source=stdlb": "did you mean 'stdlib'?",
    "data.tokenizer=bite": "did you mean 'byte' or",
    "plan={exchange: {dense: {x: 1}, topk: {}}}": "plan.exchange: wanted a method",
    "plan.exchange.two_shot.codec=int9": "command line: plan.exchange.two_shot.codec",
    "plan.exchange.hierarchical={inter: dense, intra_codec: int9}": "intra_codec: ",
    "plan.exchange=[[bias, all, dens]]": "plan.exchange.0.2: ",
    "plan.exchange=[[bias, al, dense]]": "plan.exchange.0.1: there is no link level 'al': did you mean 'all'?",
    "plan.exchange=[['(', all, dense]]": "plan.exchange.0.0: wanted a regular expression, got '('",
    "plan.exchange=[[bias, intra, dense]]": (
        "plan.exchange.0.1: wanted an exchange for each of the levels intra and inter"
    ),
    "plan.exchange=[[a, intra, int9], [a, inter, dense]]": "did you mean 'int8'",
}


@pytest.mark.parametrize("given", METHODS)
def test_an_unknown_method_is_told_without_and_with_building_it(given: str) -> None:
    resolved = load(None, [given])
    for look in (check_names, check_methods):
        with pytest.raises(BadInput) as error:
            look(resolved)
        assert METHODS[given] in str(error.value)


def test_a_wrong_value_of_a_parameter_is_told_when_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train:\n  optimizer:\n    adamw: {lr: fast}\n")
    resolved = load(tmp_path / "run.yaml")
    with pytest.raises(BadInput, match=r"run\.yaml:2: train\.optimizer\.adamw\.lr: wanted a number, got 'fast'"):
        check_methods(resolved)


def test_a_wrong_line_of_exchanges_is_told_with_the_line_it_stands_on(tmp_path: Path) -> None:
    lines = "    - [bias, all, dense]\n    - [embed, al, dense]\n    - ['.*', all, {two_shot: {codec: in8}}]\n"
    (tmp_path / "run.yaml").write_text(f"plan:\n  exchange:\n{lines}")
    resolved = load(tmp_path / "run.yaml")
    for look in (check_names, check_methods):
        with pytest.raises(BadInput, match=r"run\.yaml:4: plan\.exchange\.1\.1: there is no link level 'al'"):
            look(resolved)
    (tmp_path / "run.yaml").write_text(f"plan:\n  exchange:\n{lines.replace('al,', 'all,')}")
    resolved = load(tmp_path / "run.yaml")
    for look in (check_names, check_methods):
        with pytest.raises(BadInput, match=r"run\.yaml:5: plan\.exchange\.2\.2\.two_shot\.codec: .*'int8'"):
            look(resolved)
    wrong = said(tmp_path, "plan: {exchange: [[bias, dense]]}")
    assert "plan.exchange: wanted a method" in wrong and "[parameter pattern, level, method]" in wrong


def test_the_defaults_name_methods_that_exist() -> None:
    check_names(load(None))
    check_methods(Resolved.of(RunConfig()))
