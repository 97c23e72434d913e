"""Who of several ranks on a host writes what of a checkpoint that all of them have."""

from __future__ import annotations

import pytest
import torch

from gossamer.run.checkpoint.writers import balanced
from gossamer.store.stateful import SliceCopies, StateSlice

WEIGHT, BUFFER = SliceCopies.REPLICATED, SliceCopies.PER_REPLICA
KINDS = (("a", 40, WEIGHT), ("mean", 30, BUFFER), ("b", 10, WEIGHT), ("variance", 1, BUFFER))
SHARED = [StateSlice.whole(f"model/{name}", torch.zeros(size), kind) for name, size, kind in KINDS]


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_each_tensor_has_one_writer_and_all_buffers_have_the_same(writers: int) -> None:
    each = [balanced(SHARED, writer, writers) for writer in range(writers)]
    assert sorted(index for mine in each for index in mine) == [0, 1, 2, 3]
    assert {1, 3} <= set(each[0])


def test_parameters_are_balanced_with_the_buffers() -> None:
    assert [balanced(SHARED, writer, 2) for writer in range(2)] == [[1, 2, 3], [0]]
