"""Units of a model one after the other: their order, where a forward may end, and what that leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.unit_walk import UnitLayers, listening, run_to, unit_layers, walked_units


class Model(nn.Module):
    """Linear units a, b and c, of which `forward` calls what `route` says."""

    def __init__(self, route: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for name in "abc"})
        self.route = route

    def forward(self, x: Tensor) -> Tensor:
        for name in self.route:
            x = self.blocks[name.lower()][0](x) if name.isupper() else self.blocks[name](x)  # type: ignore[index]
        return x


def layers_of(module: Model, inputs: list[Tensor]) -> tuple[UnitLayers, ...]:
    names = [f"blocks.{name}.0" for name in "abc"]
    return unit_layers(module, names, [lambda x=x: module(x) for x in inputs], walked_units(module))


@pytest.mark.parametrize(
    ("route", "order", "ends"),
    [
        ("abc", "abc", "abc"),
        ("cab", "cab", "cab"),
        ("abca", "abc", "bc"),  # the first block is called twice
        ("abC", "abc", "ab"),  # the layer of the third is called outside of it
        ("ba", "bac", "bac"),  # the third is never called: it comes last
    ],
)
def test_units_come_in_the_order_of_their_calls(route: str, order: str, ends: str) -> None:
    module = Model(route)
    found = layers_of(module, [torch.randn(2, 4)])
    assert [one.unit for one in found] == [f"blocks.{name}" for name in order]
    assert [one.unit for one in found if one.ends] == [f"blocks.{name}" for name in ends]
    assert all(one.names == (f"{one.unit}.0",) for one in found)


def test_a_later_batch_counts_too() -> None:
    module, routes = Model("abc"), iter(["abc", "abcb"])

    def forward() -> None:
        module.route = next(routes)
        module(torch.randn(2, 4))

    names = [f"blocks.{name}.0" for name in "abc"]
    found = unit_layers(module, names, [forward, forward], walked_units(module))
    assert [one.ends for one in found] == [True, False, True]


@pytest.mark.parametrize(("route", "calls"), [("abc", "ab"), ("abcb", "abcb")])
def test_a_forward_goes_as_far_as_the_unit_needs_it(route: str, calls: str) -> None:
    module, x, ran, heard = Model(route), torch.randn(2, 4), list[str](), list[Tensor]()
    second = layers_of(module, [x])[1]
    for name, inner in module.blocks.items():
        inner.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    hooks = count_hooks(module)
    with listening(module, second.names, lambda name, given: heard.append(given)):
        run_to(module, second, [lambda: module(x)])
    assert "".join(ran) == calls and len(heard) == calls.count("b")
    assert torch.equal(heard[0], module.blocks["a"](x))
    assert hooks == count_hooks(module)


def test_an_error_of_the_model_is_not_taken_for_the_end() -> None:
    module = Model("abc")
    (first, *_) = layers_of(module, [torch.randn(2, 4)])
    forward: Callable[[], object] = lambda: module(torch.randn(2, 5))  # noqa: E731
    with pytest.raises(RuntimeError, match="shapes"):
        run_to(module, first, [forward])


@pytest.mark.parametrize(
    ("module", "units"),
    [
        (Model("abc"), tuple(f"blocks.{name}" for name in "abc")),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ("",)),
        (nn.Linear(4, 4), ("",)),
    ],
)
def test_a_model_without_repeated_blocks_is_one_unit(module: nn.Module, units: tuple[str, ...]) -> None:
    assert walked_units(module) == units


def count_hooks(module: nn.Module) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules())
