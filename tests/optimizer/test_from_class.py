"""Optimizers by import path: they move as torch moves them, and what cannot be kept of them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossamer.optimizer.from_class import FromClass
from gossamer.spec.errors import BadInput

Tensors = dict[str, torch.Tensor]
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 5), "vector": (5,), "scalar": ()}


def drawn(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        ("torch.optim:NAdam", {"weight_decay": 0.01}),
        ("torch.optim:Adagrad", {"initial_accumulator_value": 0.5}),
        ("torch.optim:Rprop", {}),
        ("torch.optim:RMSprop", {"centered": True, "momentum": 0.9}),
        ("torch.optim:SGD", {"momentum": 0.9, "nesterov": True}),
        ("torch.optim:Adamax", {}),
    ],
)
def test_it_moves_as_in_torch_and_goes_on_from_its_states(path: str, arguments: dict[str, Any]) -> None:
    rule = FromClass(path=path, lr=0.02, arguments=arguments)
    ours, theirs = drawn(1), {name: nn.Parameter(one) for name, one in drawn(1).items()}
    state = rule.init(ours)
    other = getattr(torch.optim, path.partition(":")[2])(list(theirs.values()), lr=0.02, **arguments)
    for step in range(6):
        if step == 3:  # stop, and go on from what is kept
            kept, state = state, rule.init(ours)
            for name, slots in kept.items():
                for slot, value in slots.items():
                    state[name][slot].copy_(value)
        rule.update(ours, drawn(10 + step), state, lr_scale=1 / (1 + step), step=step)
        for group in other.param_groups:
            group["lr"] = 0.02 / (1 + step)
        for name, grad in drawn(10 + step).items():
            theirs[name].grad = grad
        other.step()
    assert all(torch.equal(ours[name], theirs[name].detach()) for name in SHAPES)


@pytest.mark.parametrize("fused", [False, True])
def test_elements_in_another_order_than_rows_move_as_in_torch(fused: bool) -> None:
    """Kernels of fused optimizers walk through the memory of parameter, gradient and states side by side."""
    orders: dict[str, Any] = {
        "kernel": lambda one: one.to(memory_format=torch.channels_last),
        "transposed": lambda one: one.T.contiguous().T,
    }
    shapes = {"kernel": (4, 3, 3, 3), "transposed": (5, 7)}
    draw = torch.Generator().manual_seed(1)
    first = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    ours = {name: orders[name](one.clone()) for name, one in first.items()}
    theirs = {name: nn.Parameter(orders[name](one.clone())) for name, one in first.items()}
    rule = FromClass(path="torch.optim:AdamW", lr=0.02, arguments={"fused": fused})
    state = rule.init(ours)
    other = torch.optim.AdamW(list(theirs.values()), lr=0.02, fused=fused)
    for step in range(4):
        grads = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        rule.update(ours, grads, state, lr_scale=1.0, step=step)
        for name, grad in grads.items():
            theirs[name].grad = orders[name](grad.clone())
        other.step()
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name], param.detach(), rtol=1e-6, atol=1e-7)


def test_what_a_rank_cannot_do_alone_is_known() -> None:
    assert FromClass(path="torch.optim:NAdam").by_element
    assert not FromClass(path="optimizer.classes:OfNorm").by_element


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("torch.optim:LBFGS", r"torch\.optim:LBFGS to take a step, got TypeError"),
        ("torch.optim:Adafactor", r"torch\.optim:Adafactor with row_var of a parameter \(4, 3\) as \(4, 1\)"),
        ("optimizer.classes:OfAll", "an update that depends on the other parameters"),
        ("optimizer.classes:InGroup", "with rounds in its parameter groups"),
        ("optimizer.classes:InItself", "with rounds in the optimizer itself"),
        ("torch.optim:Optimizer", "Optimizer"),
        ("torch.optim:Nadam", "has no function 'Nadam'"),
        ("torch.nn:Linear", r"a subclass of torch\.optim\.Optimizer"),
    ],
)
def test_what_cannot_be_kept_is_refused(path: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        FromClass(path=path)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(BadInput, match="arguments of torch.optim:NAdam"):  # noqa: RUF043
        FromClass(arguments={"beta": 0.9})
