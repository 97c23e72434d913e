from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import balanced_split, shared_names, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.unit_config import given_units
from gossamer.model.units import block_names, unit_names
from gossamer.spec.errors import BadInput
from model.cuttable import WIDTH, Layer, rows


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x)) + self.second(x)


class Nested(nn.Module):
    """No repeated blocks on its top, a parameter of its own, and one block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = Twin()
        self.lists = nn.ModuleList([Layer(), nn.ReLU()])
        self.again = self.lists[0]
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x * self.scale)
        return self.head(self.again(self.lists[1](self.lists[0](x))))


def test_named_modules_are_units_and_so_is_all_else_that_owns_parameters() -> None:
    module = Nested()
    assert given_units(module, []) == ("inner", "lists.0", "head")
    assert given_units(module, ["inner.second"]) == ("inner.first", "inner.second", "lists.0", "head")
    assert given_units(module, ["inner.act", "head"]) == ("inner.first", "inner.second", "inner.act", "lists.0", "head")
    assert given_units(module, ["again"]) == ("inner", "again", "head")
    assert given_units(module, ["lists.1", "lists.0.mix"]) == ("inner", "lists.0.mix", "lists.1", "head")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["inner.frist"], r"no module 'inner\.frist': did you mean 'inner\.first'"),
        ([""], "no module ''"),
        (["inner.first.mix.weight"], "no module"),
        (["lists"], r"lists, a ModuleList, which has no forward: name the modules in it \(lists\.0, lists\.1\)"),
        (["inner.first", "inner"], r"inner and inner\.first, which is inside inner: name"),
        (
            ["lists.0", "again"],
            r"again and lists\.0, which are the same module|lists\.0 and again, which are the same module",
        ),
    ],
)
def test_names_that_cannot_be_units_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        given_units(Nested(), names)


def loss_of(x: Tensor, module: nn.Module, _: object) -> Tensor:
    loss: Tensor = module(x).square().mean()
    return loss


def test_a_model_is_cut_at_named_modules() -> None:
    torch.manual_seed(0)
    module, loss = Nested(), partial(loss_of, rows())
    flow = trace(module, lambda: loss(module, None), units=given_units(module, ["inner.act", "lists.1"]))
    assert [c.name for c in flow.calls] == [
        "inner.first", "inner.act", "inner.second", "lists.0", "lists.1", "lists.0@1", "head",
    ]  # fmt: skip
    expected = loss(module, None)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(expected, parameters), strict=True))
    for stages in (2, 7):
        cuts = balanced_split(flow, stages)
        ours = run_lockstep(stages_of(module, flow, cuts), loss, [{}])
        assert torch.equal(ours.losses[0], expected.detach()) and ours.gradients.keys() == gradients.keys()
        summed = shared_names(stage_specs(module, flow, cuts), module)
        for name, gradient in gradients.items():
            if name in summed:
                torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(ours.gradients[name], gradient)


class Named(nn.Module):
    """Blocks in a dict, of which one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Layer() for name in ("a", "b", "c")})
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def test_a_dict_of_blocks_is_a_list_and_what_is_never_called_is_named() -> None:
    module = Named()
    assert unit_names(module) == ("layers.a", "layers.b", "layers.c", "spare", "head")
    assert block_names(module) == ("layers.a", "layers.b", "layers.c")
    flow = trace(module, lambda: module(rows(2)[0]), units=unit_names(module))
    with pytest.raises(BadInput, match=r"at least 5 units.*; spare own parameters and are never called.*plan\.units"):
        balanced_split(flow, 5)


def test_a_dict_of_other_things_is_none() -> None:
    module = nn.Module()
    module.add_module("parts", nn.ModuleDict({"embed": nn.Linear(4, 4), "blocks": nn.Sequential(Layer(), Layer())}))
    assert block_names(module) == ()
