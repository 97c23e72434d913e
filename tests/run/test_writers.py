"""Who of several ranks on a host writes what of a checkpoint that all of them have."""

from __future__ import annotations

import pytest
import torch

from gossamer.run.checkpoint.writers import balanced

SHARED = [(f"model/{name}", torch.zeros(size)) for name, size in (("a", 40), ("mean", 30), ("b", 10), ("variance", 1))]
BUFFERS = {"model/mean", "model/variance"}


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_each_tensor_has_one_writer_and_all_buffers_have_the_same(writers: int) -> None:
    each = [balanced(SHARED, BUFFERS, writer, writers) for writer in range(writers)]
    assert sorted(index for mine in each for index in mine) == [0, 1, 2, 3]
    assert {1, 3} <= set(each[0])


def test_parameters_are_balanced_with_the_buffers() -> None:
    assert [balanced(SHARED, BUFFERS, writer, 2) for writer in range(2)] == [[1, 2, 3], [0]]
