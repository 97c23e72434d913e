"""Exchanges by parameter: which line holds, what two levels become, and every way of writing it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gossamer.exchange.dense import Dense
from gossamer.exchange.error_feedback import ErrorFeedback
from gossamer.exchange.hierarchical import Hierarchical
from gossamer.exchange.topk import TopK
from gossamer.exchange.two_shot import TwoShot
from gossamer.recipe import ParameterRules
from gossamer.spec.errors import BadInput
from gossamer.spec.method_config import told
from gossamer.spec.plan import Plan

NAMES = ("embed.weight", "blocks.0.norm.bias", "blocks.0.attention.weight", "blocks.10.norm.bias", "head.weight")
INT8 = {"two_shot": {"codec": "int8"}}
TOPK = {"error_feedback": {"topk": {"fraction": 0.1}}}


def test_one_method_is_for_all() -> None:
    found = ParameterRules.read(TOPK).by_name(NAMES)
    assert set(found.values()) == {ErrorFeedback(TopK(fraction=0.1))} and list(found) == list(NAMES)
    assert ParameterRules.read("dense").of("anything") == Dense()


def test_the_first_line_that_matches_holds_and_dense_is_the_last_resort() -> None:
    rules = ParameterRules.read(
        [("bias$", "all", "dense"), (r"^blocks\.0\.", "all", INT8), ("blocks|head", "all", TOPK)]
    )
    kinds = {name: type(one) for name, one in rules.by_name(NAMES).items()}
    assert kinds == {
        "embed.weight": Dense,
        "blocks.0.norm.bias": Dense,
        "blocks.0.attention.weight": TwoShot,
        "blocks.10.norm.bias": Dense,
        "head.weight": ErrorFeedback,
    }
    assert all(rules.of(name) == one for name, one in rules.by_name(NAMES).items())


def test_parameters_of_one_line_may_share_a_bucket() -> None:
    found = ParameterRules.read([("bias", "all", INT8), (".*", "all", TOPK)]).by_name(NAMES)
    assert len(set(found.values())) == 2, "equal values: buckets are cut by exchange"


def test_intra_and_inter_become_one_hierarchical() -> None:
    rules = ParameterRules.read([(".*", "intra", "dense"), ("bias", "inter", "dense"), (".*", "inter", TOPK)])
    found = rules.by_name(NAMES)
    assert found["embed.weight"] == Hierarchical(inter=ErrorFeedback(TopK(fraction=0.1)))
    assert found["blocks.0.norm.bias"] == Hierarchical(inter=Dense())
    coded = ParameterRules.read(
        [("a", "inter", INT8), ("a", "intra", {"int8": {"block_size": 64}}), ("b", "all", INT8)]
    )
    one = coded.of("a")
    assert isinstance(one, Hierarchical) and isinstance(one.inter, TwoShot)
    assert one.intra_codec is not None and "block_size=64" in repr(one.intra_codec)
    assert isinstance(coded.of("b"), TwoShot) and coded.of("c") == Dense()


def test_lines_survive_the_plan_file() -> None:
    lines: Any = [["bias", "all", "dense"], [".*", "all", TOPK]]
    plan = Plan(rows=(1,), microbatches=(1,), exchange=lines)
    again = Plan.model_validate(plan.model_dump(mode="json"))
    assert again == plan
    assert ParameterRules.read(again.exchange).by_name(NAMES) == ParameterRules.read(lines).by_name(NAMES)


WRONG = {
    "no lines": ([], "plan.exchange: wanted a method, or lines"),
    "a pair": ([("a", "dense")], "plan.exchange.0: wanted [parameter pattern, link level, method], got ('a', 'dense')"),
    "a method among lines": (["dense"], "plan.exchange.0: wanted [parameter pattern"),
    "no pattern": ([("", "all", "dense")], "plan.exchange.0.0: wanted a pattern"),
    "no expression": (
        [("a", "all", "dense"), ("(b", "all", "dense")],
        "plan.exchange.1.0: wanted a regular expression",
    ),
    "unknown level": ([("a", "intar", "dense")], "plan.exchange.0.1: there is no link level 'intar': did you mean"),
    "intra alone": (
        [("a", "intra", "dense")],
        "plan.exchange.0.1: wanted an exchange for each of the levels intra and inter",
    ),
    "inter alone": ([("a", "inter", INT8)], "add ['a', intra, dense], say"),
    "unknown method": ([("a", "all", "dens")], "plan.exchange.0.2: no exchange is called 'dens': did you mean 'dense'"),
    "unknown inner": (
        [("a", "all", {"error_feedback": "topq"})],
        "plan.exchange.0.2.error_feedback.inner: no exchange",
    ),
    "wrong value": ([("a", "all", {"topk": {"fraction": 2}})], "plan.exchange.0.2.topk.fraction: wanted 0 < fraction"),
    "exchange inside": (
        [("a", "intra", "topk"), ("a", "inter", INT8)],
        "plan.exchange.0.2: a line of level intra takes dense or a codec, not 'topk'",
    ),
    "codec misspelt": ([("a", "intra", "int9"), ("a", "inter", INT8)], "did you mean 'int8'"),
    "codec's value": (
        [("a", "intra", {"int8": {"block_size": 3}}), ("a", "inter", INT8)],
        "plan.exchange.0.2.int8.block_size: wanted a multiple of 4",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_line_is_told_with_its_place(what: str) -> None:
    written, said = WRONG[what]
    with pytest.raises(BadInput) as error:
        ParameterRules.read(written)
    assert said in str(error.value)


def test_a_line_that_serves_no_parameter_is_told() -> None:
    with pytest.raises(
        BadInput, match=r"plan\.exchange\.0\.0: .* got 'embedding': match one of their names: embed\.weight, bl"
    ):
        ParameterRules.read([("embedding", "all", "dense"), (".*", "all", INT8)]).by_name(NAMES)
    with pytest.raises(
        BadInput, match=r"plan\.exchange\.1: every parameter that 'bias' matches is served by an earlier line: m"
    ):
        ParameterRules.read([("norm", "all", INT8), ("bias", "all", "dense")]).by_name(NAMES)
    ParameterRules.read([("weight|bias", "all", INT8), (".*", "all", "dense")]).by_name(NAMES)  # a last resort may idle


def test_a_parameter_with_one_level_only_is_told() -> None:
    rules = ParameterRules.read([("bias", "intra", "dense"), (".*", "inter", INT8)])
    assert isinstance(rules.of("blocks.0.norm.bias"), Hierarchical)
    with pytest.raises(
        BadInput, match=r"a line of level intra for parameter embed\.weight, as it has one of level inter"
    ):
        rules.by_name(NAMES)


def test_a_choice_is_told_in_one_line() -> None:
    assert told("dense") == "dense"
    assert told(TOPK) == "error_feedback(topk(fraction=0.1))"
    assert told(INT8) == "two_shot(codec=int8)"
    assert told([("bias", "all", "dense"), (".*", "inter", INT8)]) == "bias: dense; .* inter: two_shot(codec=int8)"
