"""What runs in a backward finds in Python what its own forward has left, however many forwards came in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.reference import gradients_of, stages_of
from gossamer.model.split.split_points import SplitPoints
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.kept import Block, Net
from model.test_cut_absent import BATCHES, THIRDS, loss_of


class FullHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(type(self).scaled)

    def forward(self, x: Tensor) -> Any:
        self.size = x.detach().abs().mean()
        return super().forward(x)

    def scaled(self, grads: Any, outputs: Any) -> Any:
        return tuple(None if g is None else g * (0.5 + self.size) for g in grads)


class InnerHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        y = self.mix(x)
        y.register_hook(lambda grad: grad * self.count)
        return x + torch.tanh(y)


class BufferHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.last = float(x.detach().mean())
        self.size.copy_(x.detach().abs().mean())  # type: ignore[operator]
        y = self.mix(x)
        y.register_hook(lambda grad: grad * (0.5 + self.size))
        return x + torch.tanh(y)


class Between(Net):
    def between(self, i: int, got: Any) -> Any:
        if i == 1:
            self.size = got.detach().abs().mean()
            got.register_hook(lambda grad: grad * (0.5 + self.size))
        return got


class Keeps(torch.autograd.Function):
    kept: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Keeps.kept = x.detach().sign()
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * Keeps.kept


class UsesKeeps(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + 0.1 * Keeps.apply(self.mix(x))


class OneKeeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = UsesKeeps()


class KeepsGradient(Block):
    """What a backward leaves, and nobody but it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0
        self.mix.register_full_backward_hook(self.noted)

    def noted(self, module: Any, grads: Any, outputs: Any) -> Any:
        self.average = 0.9 * self.average + float(outputs[0].norm())
        return (grads[0] * self.average,)


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.times = 0, 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out

    def inner(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x)) * self.count


class CountsInside(Counts):
    def inner(self, x: Tensor) -> Tensor:
        self.times += 1
        return super().inner(x) * self.times


class CountsBackwards(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        CountsBackwards.count += 1
        return grad * CountsBackwards.count


class UsesCounts(Net):
    def between(self, i: int, got: Any) -> Any:
        return CountsBackwards.apply(got)


class ReadsAnother(Net):
    """A hook of a late block reads what an early one keeps."""

    block = BufferHook

    def between(self, i: int, got: Any) -> Any:
        if i == 2:
            got.register_hook(lambda grad: grad * (1 + self.blocks[0].last))
        return got


class AroundAll(Net):
    """Backward hooks of every unit, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        for i, unit in enumerate([*self.blocks, self.outlet]):
            unit.register_full_backward_hook(
                lambda _, grads, outputs: tuple(None if g is None else g.clamp(-1e-3, 2e-3) for g in grads)
            )
            if i % 2:
                unit.register_full_backward_pre_hook(lambda _, outputs: tuple(g * 0.9 for g in outputs))


class Skips(AroundAll):
    def forward(self, x: Tensor) -> Tensor:
        x = first = self.inlet(x)
        for block in self.blocks:
            x = block(x) + 0.1 * first
            first = x if block is self.blocks[0] else first
        y: Tensor = self.outlet(x)
        return y


class HookOfTheList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.blocks)
        del self.blocks
        self.body.register_full_backward_hook(lambda _, grads, outputs: (grads[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outlet(self.body(self.inlet(x)))
        return y


class Nodes(Net):
    def between(self, i: int, got: Any) -> Any:
        got.grad_fn.register_prehook(lambda grads: tuple(g * 0.5 for g in grads))
        return got


class Penalty(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            y, x = x, block(x)
        (gradient,) = torch.autograd.grad(x.sum(), y, create_graph=True)
        out: Tensor = self.outlet(x) * gradient.square().mean()
        return out


class Replaced(AroundAll):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: output * 2)


def of(block: type[nn.Module]) -> Callable[[], nn.Module]:
    return type("Another", (Net,), {"block": block})


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "full_hook": of(FullHook),
    "tensor_hook": of(InnerHook),
    "buffer": of(BufferHook),
    "between": Between,
    "class": OneKeeps,
    "checkpoint": of(Counts),
    "around": AroundAll,
    "around_skips": Skips,
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "classes": (of(UsesKeeps), "the class Keeps.kept.*writes by blocks.0"),
    "counts": (UsesCounts, "changes the class CountsBackwards.count"),
    "recomputed": (of(CountsInside), r"changes blocks\.\d\.times"),
    "list": (HookOfTheList, "wanted body, which has backward hooks, in one stage"),
    "replaced": (Replaced, "backward hooks and forward hooks that replace the output"),
    "node": (Nodes, "grad_fn of an output of blocks.0"),
    "gradient": (Penalty, "gradients that are taken in the forward .*blocks.3"),
    "another": (ReadsAnother, "reads blocks.0.last"),
}


def in_turns(stages: Sequence[StageModule], way: str) -> None:
    """Forwards of all batches, and then their backwards."""
    waiting: list[list[InFlight]] = []
    for batch in BATCHES:
        tensors: Mapping[CallOutput, Tensor] = {}
        lives = []
        for stage in stages:
            run = partial(loss_of, stage.module, batch)
            lives.append(stage.forward(run, tensors, keep_graph=way != "recompute"))
            tensors = lives[-1].sent
        waiting.append(lives)
    for lives in waiting:
        gradients: dict[CallOutput, Tensor] = {}
        for live in reversed(lives):
            if way == "recompute":
                live.recompute()
            if way == "split":
                gradients = live.backward_input(gradients, loss=live.result)
            else:
                gradients = live.backward(gradients, loss=live.result)
        for live in lives if way == "split" else ():
            live.backward_weight()


def compare(module: nn.Module, way: str) -> None:
    whole = copy.deepcopy(module)
    Keeps.kept = None
    cuts = THIRDS if hasattr(module, "blocks") else SplitPoints(("inlet", "body.1", "body.3"))
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    stages = stages_of(module, flow, cuts)
    for batch in BATCHES:
        loss_of(whole, batch).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    in_turns(stages, way)
    for name, gradient in gradients_of(stages).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("way", ["plain", "recompute", "split"])
@pytest.mark.parametrize("kind", EQUAL)
def test_a_backward_finds_what_its_forward_has_left(kind: str, way: str) -> None:
    torch.manual_seed(0)
    compare(EQUAL[kind](), way)


@pytest.mark.parametrize("way", ["plain", "recompute"])
def test_what_only_a_backward_uses_goes_on(way: str) -> None:
    torch.manual_seed(0)
    compare(of(KeepsGradient)(), way)


@pytest.mark.parametrize("kind", REFUSED)
def test_or_it_is_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    make, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        compare(make(), "plain")


def test_in_two_parts_a_hook_that_counts_is_refused() -> None:
    with pytest.raises(BadInput, match=r"changes blocks\.\d\.average"):
        compare(of(KeepsGradient)(), "split")
