"""Errors of a split in the words of who asked for it: a training in stages, or a teacher that is served in stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gossamer.model.split.split_error import SplitArguments, SplitError, in_words_of, split_error
from gossamer.model.split.split_points import SplitPoints, balanced_split, stage_specs
from gossamer.run.remote_teacher.stage import TEACHER
from gossamer.spec.errors import BadInput
from model.cuttable import Chain, rows
from model.test_cut import flow_of


def said(work: Callable[[], object], arguments: SplitArguments) -> BadInput:
    with pytest.raises(BadInput) as found, in_words_of(arguments):
        work()
    return found.value


def test_a_split_is_refused_in_the_words_of_who_asked_for_it() -> None:
    """A teacher has --stage and --cuts, and no units to name: that way out is not offered."""
    module = Chain()
    flow = flow_of(module, {"x": rows()})
    for work, training, teacher in (
        (lambda: balanced_split(flow, 40), "between them (plan.units), or use", "--stage: wanted at least 40 units"),
        (lambda: stage_specs(module, flow, SplitPoints(("blocks.1", "head"))), "first in plan.cuts", "first in --cuts"),
        (lambda: stage_specs(module, flow, SplitPoints(("no", "head"))), "no unit 'no'", "--stage: there is no unit"),
    ):
        with pytest.raises(BadInput) as found:
            work()
        assert training in str(found.value) and str(found.value).startswith("plan.mesh.pipe: ")
        worded = said(work, TEACHER)
        assert teacher in str(worded) and "plan." not in str(worded) and worded.key == "--stage"


def test_what_to_do_is_whole_without_units() -> None:
    without = SplitArguments(stages="--n", cuts="--at", units="", whole="leave it whole")
    first = split_error(wanted="a", got="b", do=lambda say: say.units_or("name one", say.whole))
    second = split_error(wanted="a", got="b", do=lambda say: "do it" + say.or_units("name one"), about="cuts")
    assert str(first) == "plan.mesh.pipe: wanted a, got b: name one (plan.units), or set plan.mesh.pipe: 1"
    assert str(first.said(without)) == "--n: wanted a, got b: leave it whole"
    assert str(second) == "plan.cuts: wanted a, got b: do it, or name one (plan.units)"
    assert str(second.said(without)) == "--at: wanted a, got b: do it"
    assert isinstance(first, SplitError) and not isinstance(first.said(without), SplitError)
