"""On one rank a forward that is run again finds what the first run found, and leaves nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.run.step_runner import UnsplitModel
from gossamer.spec.errors import BadInput
from model.kept import Block, Net
from model.test_cut_absent import BATCHES, loss_of


class Attribute(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = torch.zeros(())

    def average(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mean.mul_(0.9).add_(x.detach().mean())
        return mean

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.tanh(self.mix(x))) * (1 + self.average(x).clone())


class Buffer(Attribute):
    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.register_buffer("mean", torch.zeros(()))


class Untrained(Attribute):
    def __init__(self) -> None:
        super().__init__()
        mean = self.__dict__.pop("mean")
        self.mean = nn.Parameter(mean, requires_grad=False)


class InAList(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.means = [self.__dict__.pop("mean")]

    def average(self, x: Tensor) -> Tensor:
        mean: Tensor = self.means[0].mul_(0.9).add_(x.detach().mean())
        return mean


class Later(Attribute):
    count = 0

    def average(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().average(x) if self.count > 2 else torch.zeros(())


class Trained(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mix.weight.mul_(0.9)
        return super().forward(x)  # type: ignore[no-any-return]


def whole_of(module: nn.Module) -> UnsplitModel:
    def loss(rows: Mapping[str, Any], *, step: int, key: int) -> Tensor:
        return loss_of(module, rows)

    return UnsplitModel(SimpleNamespace(module=module, loss=loss, loss_of_copies=loss))  # type: ignore[arg-type]


def net_of(block: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return type("Another", (Net,), {"block": block})()


def recomputed(module: nn.Module) -> None:
    """Forwards of all batches, and then their backwards."""
    whole = whole_of(module)
    pieces: list[Any] = [SimpleNamespace(rows=batch, key=0) for batch in BATCHES]
    lives = [whole.forward(piece, 0, {}, keep_graph=False) for piece in pieces]
    for live in lives:
        live.recompute()
        live.backward({}, loss=live.result)


@pytest.mark.parametrize("block", [Attribute, Buffer, Untrained])
def test_what_a_forward_writes_to_counts_once(block: Callable[[], nn.Module]) -> None:
    ours, plain = net_of(block), net_of(block)
    recomputed(ours)
    for batch in BATCHES:
        loss_of(plain, batch).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert [b.mean for b in ours.blocks] == [b.mean for b in plain.blocks]


@pytest.mark.parametrize(("block", "said"), [(InAList, "means"), (Later, "mean"), (Trained, r"mix\.weight")])
def test_or_is_refused_by_name(block: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(
        BadInput,
        match=rf"does not write in place to (the trained parameter )?blocks\.\d\.{said}, as .*runs the forward twice",
    ):
        recomputed(net_of(block))
