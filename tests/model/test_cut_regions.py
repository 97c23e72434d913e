"""Checkpointed regions of the model's own code, with units of several stages in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gossamer.model.split.split_points import SplitPoints
from gossamer.spec.errors import BadInput
from model.kept import Block, Net
from model.test_cut_absent import THIRDS, compare
from model.test_cut_flight import compare_in_flight

HALVES = SplitPoints(("inlet", "outlet@1"))


class Segments(Net):
    """Blocks in two checkpointed segments."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = nn.Sequential(*self.blocks)
        return self.outlet(checkpoint_sequential(blocks, 2, self.inlet(x), use_reentrant=False))


class Chunks(Net):
    """The outlet and what follows it, in checkpointed chunks of rows."""

    def piece(self, x: Tensor) -> Tensor:
        return torch.tanh(self.outlet(x)) ** 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return torch.cat([checkpoint(self.piece, rows, use_reentrant=False) for rows in x.split(1)])


class Nested(Net):
    """A region within a region, and a block with a region of its own."""

    def pair(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[1](torch.tanh(self.blocks[0](x))))

    def rest(self, x: Tensor) -> Tensor:
        return torch.sin(self.blocks[3](self.pair(x)).exp())

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.rest, self.inlet(x), use_reentrant=False)
        return self.outlet(checkpoint(self.blocks[2], x, use_reentrant=False))


class Doubles(Net):
    """What a unit gives is changed in place in the region."""

    def pair(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[1](self.blocks[0](x).mul_(2.0)).exp())

    def forward(self, x: Tensor) -> Any:
        return self.outlet(checkpoint(self.pair, self.inlet(x), use_reentrant=False))


CASES: tuple[tuple[type[Net], SplitPoints], ...] = (
    (Segments, THIRDS),
    (Chunks, HALVES),
    (Nested, SplitPoints(("inlet", "blocks.1", "blocks.2"))),
)


@pytest.mark.parametrize(("kind", "cuts"), CASES)
def test_a_region_is_run_again_with_what_other_stages_gave(kind: type[Net], cuts: SplitPoints) -> None:
    torch.manual_seed(0)
    compare(kind(), cuts)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(("kind", "cuts"), CASES)
def test_each_micro_batch_with_its_own(kind: type[Net], cuts: SplitPoints, is_recomputed: bool) -> None:
    torch.manual_seed(0)
    compare_in_flight(kind(), cuts, is_recomputed=is_recomputed)


def test_what_is_changed_in_place_in_a_region_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"wanted blocks.0, which the model's code calls in a checkpointed region"):
        compare(Doubles(), SplitPoints(("inlet", "blocks.1")))


class Counts(Block):
    count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x), self.count


class CountsInARegion(Net):
    block = Counts

    def pair(self, x: Tensor) -> Tensor:
        x, count = self.blocks[0](x)
        return torch.tanh(self.blocks[1](x * count)[0].exp())

    def forward(self, x: Tensor) -> Any:
        return self.outlet(checkpoint(self.pair, self.inlet(x), use_reentrant=False))


def test_so_is_a_unit_that_does_something_in_python() -> None:
    with pytest.raises(BadInput, match=r"blocks.0|blocks\.0\.count"):
        compare(CountsInARegion(), SplitPoints(("inlet", "blocks.1")))
