"""A room of methods: found by file name, built from what people write, with every mistake named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import MethodConfig
from gossamer.spec.registry import Registry, _coerce, registry_of

FILES = {
    "__init__.py": """
        from abc import ABC
        from gossamer.spec.registry import Registry
        class Wing(ABC):
            pass
        REGISTRY = Registry(__name__, Wing)
    """,
    "plain.py": """
        from dataclasses import dataclass
        from toyroom import Wing
        from toyroom._shared import Helper
        @dataclass(frozen=True)
        class Plain(Wing):
            pass
    """,
    "top_k.py": """
        from dataclasses import dataclass
        from gossamer.spec.errors import BadInput
        from toyroom import Wing
        @dataclass(frozen=True)
        class TopK(Wing):
            fraction: float
            rounds: int = 1
            names: tuple[str, ...] = ()
            def __post_init__(self) -> None:
                if not 0 < self.fraction <= 1:
                    raise BadInput(f"{self.fraction} is no fraction", key="fraction")
    """,
    "wrapped.py": """
        from dataclasses import dataclass
        from toyroom import Wing
        @dataclass(frozen=True)
        class Wrapped(Wing):
            inner: Wing
            decay: float = 1.0
    """,
    "_shared.py": """
        class Helper:
            pass
    """,
    "presets.toml": """
        [half]
        base = {top_k = {fraction = 0.5, rounds = 2}}
        paper = "Someone, 2020"
    """,
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Any]]:
    """A room with four methods (one a preset) in a package of its own."""
    folder = tmp_path / "toyroom"
    folder.mkdir()
    for name, text in FILES.items():
        lines = [line[8:] for line in text.splitlines()]
        (folder / name).write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("toyroom").REGISTRY
    for name in [name for name in sys.modules if name.partition(".")[0] == "toyroom"]:
        del sys.modules[name]


def test_names_are_files_and_presets_and_nothing_is_imported_for_them(toy: Registry[Any]) -> None:
    assert toy.names() == ("half", "plain", "top_k", "wrapped")
    assert "toyroom.plain" not in sys.modules


def test_a_method_is_built_from_each_way_of_writing_it(toy: Registry[Any]) -> None:
    for written in ("plain", {"plain": None}, {"plain": {}}, MethodConfig("plain")):
        assert repr(toy.build(written)) == "Plain()"
    assert toy.build({"top_k": {"fraction": 0.1}}) == toy.build(MethodConfig("top_k", {"fraction": 0.1}))


def test_values_are_coerced_as_yaml_needs(toy: Registry[Any]) -> None:
    built = toy.build({"top_k": {"fraction": "1e-2", "rounds": "3", "names": ["a"]}})
    assert (built.fraction, built.rounds, built.names) == (0.01, 3, ("a",))


def test_annotations_that_are_equal_coerce_each_by_its_own_order() -> None:
    assert (int | float) == (float | int)
    found = [_coerce("3", cls, "one", key="") for cls in (WholeFirst, NumberFirst)]
    assert list(map(type, found)) == [int, float]


@dataclass(frozen=True)
class WholeFirst:
    one: int | float


@dataclass(frozen=True)
class NumberFirst:
    one: float | int


def test_a_preset_is_another_method_with_fields_set_which_can_be_set_again(toy: Registry[Any]) -> None:
    assert toy.build("half") == toy.build({"top_k": {"fraction": 0.5, "rounds": 2}})
    assert toy.build({"half": {"rounds": 5}}).rounds == 5
    assert toy.type("half") is toy.type("top_k")


def test_an_inner_method_may_be_written_short_or_by_name(toy: Registry[Any]) -> None:
    long = toy.build({"wrapped": {"inner": {"top_k": {"fraction": 0.1}}}})
    assert toy.build({"wrapped": {"top_k": {"fraction": 0.1}}}) == long
    assert toy.build({"wrapped": "plain"}).inner == toy.build("plain")
    twice = toy.build({"wrapped": {"inner": {"wrapped": {"half": {}}}, "decay": 0.9}})
    assert (twice.decay, twice.inner.inner.fraction) == (0.9, 0.5)


WRONG: list[tuple[Any, str, str]] = [
    ("plian", "k", "k: no wing is called 'plian': did you mean 'plain'?"),
    ("_shared", "", "no wing is called '_shared'"),
    ("hlf", "", "did you mean 'half'?"),
    ({"top_k": {"fracton": 0.1}}, "k", "k.top_k: top_k has no parameter 'fracton': did you mean 'fraction'?"),
    ({"plain": {"x": 1}}, "", "plain has no parameter 'x': known: none"),
    ({"top_k": {"fraction": "much"}}, "k", "k.top_k.fraction: wanted a number, got 'much'"),
    ({"top_k": {"fraction": 2}}, "k", "k.top_k.fraction: 2.0 is no fraction"),
    ({"top_k": {}}, "k", "k.top_k: top_k needs 'fraction': write {top_k: {fraction: ...}}"),
    ({"wrapped": {"top_k": {"fracton": 1}}}, "k", "k.wrapped.inner.top_k: top_k has no parameter 'fracton'"),
    ({"wrapped": {"inner": "plian"}}, "k", "k.wrapped.inner: no wing is called 'plian'"),
    ({"a": {}, "b": {}}, "k", "k: wanted a method: a name, or one name with its parameters"),
    ({"plain": 3}, "", "wanted a method"),
    (3, "", "wanted a method"),
    ({}, "", "wanted a method"),
]


@pytest.mark.parametrize(("written", "key", "said"), WRONG, ids=lambda x: str(x)[:30])
def test_a_mistake_names_what_is_known(written: Any, key: str, said: str, toy: Registry[Any]) -> None:
    with pytest.raises(BadInput) as error:
        toy.build(written, key=key)
    assert said in str(error.value)


def test_the_room_of_an_abstract_class_stands_beside_it(toy: Registry[Any]) -> None:
    assert registry_of(toy.base) is toy
    assert registry_of(Path) is None


@pytest.mark.parametrize("written", ["plain", {"top_k": {"fraction": 0.1}}])
def test_a_choice_is_written_as_it_is_read(written: Any) -> None:
    assert MethodConfig.parse(written).written() == written
