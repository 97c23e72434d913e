"""What blocks give and change in Python is the same in stages as in one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.model.split.split_points import SplitPoints, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.split.value_reads import ValueReads
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput, WireMismatch
from model.kept import CountsAtTheEnd, Net
from model.pythonic import EQUAL, REFUSED
from model.test_cut_absent import BATCHES, compare, loss_of


@pytest.mark.parametrize(
    "cuts",
    [
        SplitPoints(("inlet", "blocks.1", "blocks.3")),
        pytest.param(SplitPoints(("inlet", "blocks.2")), marks=pytest.mark.nightly),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", EQUAL)
def test_it_is_as_in_one_process(kind: str, cuts: SplitPoints) -> None:
    torch.manual_seed(0)
    module = EQUAL[kind]()
    if kind == "shared":
        cuts = SplitPoints(("inlet", "blocks.0@1", "blocks.0@3"))
    compare(module, cuts, is_keyed=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_or_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    make, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        compare(make())


def test_a_look_that_an_early_stage_cannot_follow_is_refused_where_what_comes_behind_it_is_read_again() -> None:
    class Counts(CountsAtTheEnd):
        def between(self, i: int, got: Any) -> Any:
            return got * 2 if i == 3 and got.mean() > 50 else got

    module = Counts()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    with pytest.raises(BadInput, match=r"wanted the update of count, .*stage 0 does not have.*before outlet"):
        stage_specs(module, flow, SplitPoints(("inlet", "blocks.3")))

    class Logs(Counts):
        def forward(self, x: Any) -> Any:
            y = Net.forward(self, x)
            self.norm = float(y.detach().norm())  # nobody reads it
            return y

    compare(Logs(), SplitPoints(("inlet", "blocks.3")))


def test_what_was_looked_at_arrives_as_it_was_and_nothing_else_does() -> None:
    looks = ValueReads()
    tensor = torch.tensor([[1.5, float("nan")], [-2.0, 1e-45]])
    with looks.noting():
        seen = [tensor.sum().item(), bool(tensor[0, 0] > 0), tensor.long()[0, 0].item(), tensor.tolist()]
        seen += [tensor.numpy(), tensor.nonzero().shape, torch.tensor(1 + 2j).item()]
    told = ValueReads.of_bytes(looks.to_bytes("unit", torch.device("cpu")))
    assert repr(list(told.seen)) == repr(list(looks.seen))
    with told.telling():
        again = [tensor.sum().item(), bool(tensor[0, 0] > 0), tensor.long()[0, 0].item(), tensor.tolist()]
        again += [tensor.numpy(), tensor.nonzero().shape, torch.tensor(1 + 2j).item()]
    assert repr(again) == repr(seen)
    for bad in (b"\0\0\0\x02{}", b"\xff" * 4, b"\0\0\0\x04[[1]", b"\0\0\0\x07[[1,2,3]]"[:11]):
        message = torch.frombuffer(bytearray(bad.ljust(2048, b"\0")), dtype=torch.uint8)
        with pytest.raises(WireMismatch):
            ValueReads.of_bytes(message)


def test_pure_blocks_are_no_shadows() -> None:
    module = Net()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    assert all(call.is_pure for call in flow.calls)
    own = EQUAL["own_mean"]()
    flow = trace(own, lambda: loss_of(own, BATCHES[0]), units=unit_names(own))
    assert all(call.is_pure for call in flow.calls), "nobody else reads it"
