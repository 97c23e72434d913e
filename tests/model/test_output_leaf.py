"""Leaves of a unit call's output."""

from __future__ import annotations

import torch

from gossamer.model.split.output_leaf import (
    ArgumentLeaf,
    ConstantLeaf,
    MadeLeaf,
    OpaqueLeaf,
    OverwrittenLeaf,
    Produced,
    RepeatedLeaf,
)

MADE = Produced.of(torch.zeros(2, 3))


def test_only_values_that_may_change_are_pythons() -> None:
    leaves = [
        ConstantLeaf(None),
        ConstantLeaf(0),
        OpaqueLeaf("deque"),
        ArgumentLeaf(0),
        RepeatedLeaf(0),
        MadeLeaf(MADE),
    ]
    assert [leaf.is_python for leaf in leaves] == [False, True, True, False, False, False]


def test_a_written_tensor_is_marked_and_keeps_its_source() -> None:
    assert MadeLeaf(MADE).written().made.written and not MADE.written
    marked = OverwrittenLeaf(MADE, 3).written()
    assert (marked.made.written, marked.source, marked.made.shape) == (True, 3, (2, 3))
