"""The configuration: every key that can be written is read by somebody; so is every axis of a plan's mesh."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.settings.describe import leaves
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import MeshSizes, Plan

SOURCE = Path(__file__).parent.parent.parent / "src" / "gossamer"
STANDS_FOR_A_SECTION = {"asked", "section", "settings", "wanted"}  # names of arguments that are one


def reads() -> Iterator[tuple[str, str]]:
    """Every `x.name` in the source outside of the configuration itself, as the last word of x, and the name."""
    for file in SOURCE.rglob("*.py"):
        if file != SOURCE / "spec" / "config.py":
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Attribute):
                    yield ast.unparse(node.value).rpartition(".")[2], node.attr


def test_every_key_of_the_configuration_is_read_somewhere() -> None:
    found = set(reads())
    for key, _ in leaves():
        section, _, name = key.rpartition(".")
        names = {section.rpartition(".")[2], *STANDS_FOR_A_SECTION}
        assert any((one, name) in found for one in names), key


def test_what_a_run_of_an_earlier_version_wrote_down_is_read_where_it_said_nothing() -> None:
    before = {"machines": {"cluster": None}, "plan": {"savers": "auto", "mesh": {"tensor": 1, "pipe": 2}}}
    assert RunConfig.model_validate(before) == RunConfig.model_validate({"plan": {"mesh": {"pipe": 2}}})
    for written in ({"machines": {"cluster": "c.yaml"}}, {"plan": {"mesh": {"tensor": 2}}}):
        with pytest.raises(ValueError, match="extra_forbidden"):
            RunConfig.model_validate(written)


def test_a_mesh_of_a_plan_has_the_axes_that_something_divides() -> None:
    assert MeshSizes.model_validate({"replica": 2, "tensor": 1}) == MeshSizes(replica=2)
    with pytest.raises(ValueError, match="extra_forbidden"):
        MeshSizes.model_validate({"replica": 2, "tensor": 2})


@pytest.mark.parametrize("buckets", [(("a", "b"), ("b",)), (("a", "a"),)])
def test_a_plan_has_no_parameter_in_two_buckets(buckets: tuple[tuple[str, ...], ...]) -> None:
    """Its gradient has one place in memory: the second bucket would send zeros."""
    assert Plan(rows=(1,), microbatches=(1,), buckets=(("a", "b"), ("c",))).buckets[1] == ("c",)
    with pytest.raises(ValueError, match=r"buckets names [ab] twice, in bucket 0 and in bucket [01]"):
        Plan(rows=(1,), microbatches=(1,), buckets=buckets)
