"""The ghost of a micro-batch: bytes that are counted by hand, and a model that is left as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.ghost_step import ghost_step
from gossamer.process.stack_position import stand
from gossamer.spec.errors import BadInput

ROWS, WIDTH, FLOAT = 32, 48, 4
X = torch.zeros(ROWS, WIDTH)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def mean(module: nn.Module) -> Tensor:
    return module(X).sum()


def test_what_autograd_keeps_is_counted() -> None:
    ghost = ghost_step(Mlp(), mean)
    # relu keeps its output, which the second layer reads; the output of the second is a view's base for the sum
    assert ghost.kept == (FLOAT * ROWS * WIDTH + FLOAT,)
    assert ghost.small == 1.0
    assert 0 < ghost.passing[0] <= 3 * FLOAT * ROWS * WIDTH + FLOAT * WIDTH * WIDTH


def test_blocks_of_a_mebibyte_are_told_apart() -> None:
    rows = torch.zeros(8192, WIDTH)
    large = ghost_step(Mlp(), lambda module: module(rows).sum())
    assert large.kept[0] == FLOAT * 8192 * WIDTH + FLOAT and large.small == FLOAT / large.kept[0]


def test_a_frozen_layer_keeps_less() -> None:
    whole, part = Mlp(), Mlp()
    part.first.requires_grad_(False)
    assert ghost_step(part, mean).kept[0] <= ghost_step(whole, mean).kept[0]
    assert sum(ghost_step(part, mean).kept) > 0


def test_without_a_backward_pass_nothing_is_kept() -> None:
    ghost = ghost_step(Mlp(), mean, has_backward=False)
    assert ghost.kept[0] <= FLOAT and ghost.passing[0] >= FLOAT * ROWS * WIDTH


def test_stages_are_counted_apart() -> None:
    ghost = ghost_step(Mlp(), mean, groups=[["first"], ["second"]])
    assert len(ghost.kept) == 2 and sum(ghost.kept) == ghost_step(Mlp(), mean).kept[0]
    assert ghost.kept[0] == FLOAT * ROWS * WIDTH, "what relu keeps is made before the second stage begins"


def test_it_takes_no_memory_and_changes_nothing() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()).expand(1 << 20, 1 << 20))  # 4 TiB, if it were there
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x @ self.weight

    module = Large()
    ghost = ghost_step(module, lambda one: one(torch.zeros(1, 1).expand(2, 1 << 20)).sum())
    assert ghost.passing[0] >= FLOAT * (1 << 40), "the gradient of the weight"
    assert module.calls == 0 and module.weight.grad is None


def test_it_counts_the_same_whoever_looks_at_the_stack() -> None:
    """A heartbeat's thread looks at frames, which keeps what they hold alive: ranks would plan with other bytes."""
    deep = nn.Sequential(*(Mlp() for _ in range(4)))
    alone = ghost_step(deep, mean)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            stand()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        found = [ghost_step(deep, mean) for _ in range(8)]
        assert all(one == alone for one in found)
    finally:
        ended.set()
        looking.join()


def test_a_forward_that_needs_values_is_refused() -> None:
    class Choosing(Mlp):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(BadInput, match="the forward needs values, and not shapes alone"):
        ghost_step(Choosing(), mean)
