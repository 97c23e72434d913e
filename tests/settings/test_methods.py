"""Methods as people write them: one reader of short forms, whether it reads source or builds, and every page passes."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gossamer.settings.catalog import Category, categories
from gossamer.settings.describe import is_method, leaves
from gossamer.settings.methods import category_of, check_methods, check_names
from gossamer.settings.resolve import Resolved, load
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(p for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if p.name != "journal.md")
_YAML = re.compile(r"^```yaml[^\n]*\n(.*?)^```", re.S | re.M)
_CODE = re.compile(r"`(?:[\w.]+[:=] ?)?(\{[^`\n]+\})`")
_SECTIONS = ("hf", "gguf", "factory")  # keys of `model`, some of which are names of methods too


def configurations(text: str) -> Iterator[dict[str, Any]]:
    """The blocks of a page that are sections of a run.yaml."""
    for block in _YAML.findall(text):
        found = yaml.safe_load(block.replace("...", ""))
        if isinstance(found, dict) and set(found) <= set(RunConfig.model_fields):
            yield found


def methods(text: str) -> Iterator[dict[str, Any]]:
    """Methods with parameters that stand in a page's sentences and code."""
    for written in _CODE.findall(text):
        try:
            found = yaml.safe_load(written)
        except yaml.YAMLError:
            continue
        if isinstance(found, dict) and len(found) == 1 and "..." not in written and not set(found) & set(_SECTIONS):
            yield found


def resolved(key: str, written: Any) -> Resolved:
    section, _, name = key.partition(".")
    return load(
        None, given={section: {name: [written] if key == "run.trackers" and isinstance(written, dict) else written}}
    )


def said(check: Any, given: Resolved) -> str:
    """What is wrong with it, without the place; "" where nothing is."""
    try:
        check(given)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_a_page_tells_people_to_write_can_be_written(page: Path) -> None:
    text = page.read_text("utf-8")
    for values in configurations(text):
        given = load(None, given=values)
        check_names(given)
        check_methods(given)
    keys = {category_of(field): key for key, field in leaves() if category_of(field)}
    known = categories()
    for written in methods(text):
        name = next(iter(written))
        there = [room for room in keys if name in known[room].methods]
        wrong = [
            said(check_names, resolved(keys[r], written)) or said(check_methods, resolved(keys[r], written))
            for r in there
        ]
        assert not there or "" in wrong, (written, wrong)


def test_the_pages_have_something_to_read() -> None:
    texts = [page.read_text("utf-8") for page in PAGES]
    assert sum(1 for text in texts for _ in configurations(text)) > 10
    assert sum(1 for text in texts for _ in methods(text)) > 10


def nestings(known: dict[str, Category], room: str, chance: random.Random, depth: int = 0) -> Any:
    """A method of `room` at random, its nested ones written short, long or not at all; now and then a name is wrong."""
    page = known[room]
    method = page.methods[chance.choice(sorted(page.methods))]
    bases = {p.base: p.name for p in known.values()}
    inner = [
        (p.name, bases[kind]) for p in method.parameters if (kind := p.annotation.removesuffix(" | None")) in bases
    ]
    typo = "x" if chance.random() < 0.1 else ""
    if not inner or depth == 3:
        return chance.choice([method.name + typo, {method.name: {}}, {method.name: {f"rank{typo}": 2}}])
    name, within = chance.choice(inner)
    nested = nestings(known, within, chance, depth + 1)
    return {method.name: nested if chance.random() < 0.6 else {name + typo: nested}}


def unknown(error: str) -> bool:
    return (
        " has no parameter " in error or " is called " in error or "there is no " in error or "wanted a method" in error
    )


def test_both_readers_agree_on_whatever_is_nested() -> None:
    chance, known, right = random.Random(3), categories(), 0
    room = importlib.import_module("gossamer.exchange").REGISTRY
    for _ in range(600):
        written = nestings(known, "exchange", chance)
        by_source = said(check_names, resolved("plan.exchange", written))
        built = ""
        try:
            room.build(written, key="plan.exchange")
        except BadInput as error:
            built = str(error)
        assert bool(by_source) == unknown(built), (written, by_source, built)
        right += not by_source
    assert 100 < right < 550


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ({"error_feedback": {"powersgd": {"ranks": 3}}}, "has no parameter 'ranks': did you mean 'rank'?"),
        ({"two_shot": "int9"}, "two_shot.codec: "),
        ({"two_shot": "int9"}, "'int9'"),
        ({"two_shot": "int9"}, "did you mean 'int8'"),
        ({"two_shot": {"codecs": "int8"}}, "has no parameter 'codecs': did you mean 'codec' or"),
        ({"error_feedback": {"topkk": {}}}, "did you mean 'topk'"),
        ("dense:3", "'dense:3'"),
    ],
    ids=str,
)
def test_a_typo_in_a_nested_method_is_told_as_what_it_is(written: Any, wanted: str) -> None:
    given = resolved("plan.exchange", written)
    assert wanted in said(check_names, given)
    assert wanted in said(check_methods, given)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("train.loss", "next_tokn"),
        ("train.optimizer", "auto"),
        ("train.lr_schedule", "none"),
        ("plan.activation_compression", "plian"),
        ("plan.activation_compression", ["none", "nonne"]),
        ("plan.sharding", "auto"),
        ("run.trackers", ["tensorbord"]),
        ("data.tokenizer", "bite"),
    ],
    ids=str,
)
def test_every_key_that_takes_a_method_is_looked_up(key: str, written: Any) -> None:
    given = resolved(key, written)
    assert key in said(check_names, given)
    assert key in said(check_methods, given)


def test_every_key_that_takes_a_method_says_of_which_room() -> None:
    known = categories()
    for key, field in leaves():
        takes = is_method(field.annotation) or "list[str | dict[str, Any]]" in str(field.annotation).replace(
            "typing.", ""
        )
        assert bool(category_of(field)) == takes, key
        assert not takes or category_of(field) in known


def test_an_unknown_method_is_refused_in_one_sentence_whoever_reads_it() -> None:
    """A file is checked against the sources, a program builds the method."""
    for name, wrong in (("exchange", "dens"), ("exchange/codec", "int9"), ("optimizer/lr_schedule", "cosin")):
        with pytest.raises(BadInput) as by_source:
            categories()[name].method(wrong)
        package = importlib.import_module("gossamer." + name.replace("/", "."))
        with pytest.raises(BadInput) as by_building:
            package.build(wrong)
        assert str(by_source.value) == str(by_building.value)
        assert f"is called {wrong!r}: did you mean" in str(by_source.value)
