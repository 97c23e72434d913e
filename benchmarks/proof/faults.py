"""Faults that a layout may have, each planted into what is run beside one process, and what a proof is to say of it.

`planted(name)` patches the layout's side alone: one process, and what is trained, stay as they are. All ranks enter it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gossamer.loss.next_token import NextToken
from gossamer.model.split.in_flight import InFlight
from gossamer.model.unit_seeds import UnitSeeds
from gossamer.pipeline.p2p import StepP2P
from gossamer.pipeline.tied_weights import TiedWeights
from gossamer.proof import divided as layouts
from gossamer.proof.divided import DividedSide
from gossamer.run.step_algorithm import Gradients
from gossamer.run.step_runner import ModelRuntime, StepRunner
from gossamer.sync import GradientReducer

Planted = Callable[[], AbstractContextManager[object]]


class Pair(nn.Module):
    """A block of two outputs alike in shape, with dropout, a norm and a running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.side = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("level", torch.zeros(width))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        mixed = torch.tanh(self.mix(self.norm(x))) * mask
        with torch.no_grad():
            self.level.mul_(0.9).add_(mixed.mean((0, 1)), alpha=0.1)
        return x + self.drop(mixed) + 0.1 * self.level, y + 0.5 * torch.sin(self.side(x)) * (1 + 0.01 * self.calls)


class Subject(nn.Module):
    """Tied weights, two tensors at every border, dropout, a mask, a buffer and a counter in every block."""

    def __init__(self, width: int = 12, vocabulary: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Pair(width) for _ in range(4))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        mask = torch.ones_like(x[..., :1]) if attention_mask is None else attention_mask[..., None].to(x.dtype)
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = block(x, y, mask)
        return self.head(self.last(x + y))


def subject() -> nn.Module:
    """The model that faults are planted into."""
    return Subject()


@dataclass(frozen=True)
class Planting:
    """A fault: how it is planted, on which ranks, in how many replicas, and a part of what is to be named."""

    plant: Planted
    named: str
    ranks: tuple[int, ...] = (1,)
    replicas: int = 1


def _gradient(name: str, change: Callable[[Tensor], Tensor]) -> Planted:
    """What a rank has of the gradient of a tensor, after all have met."""

    def plant() -> AbstractContextManager[object]:
        reduce = Gradients.reduce

        def changed(self: Gradients, step: int) -> None:
            reduce(self, step)
            found = self.replica.gradients()
            if name in found:
                found[name].copy_(change(found[name].clone()))

        return patch.object(Gradients, "reduce", changed)

    return plant


def _built(change: Callable[[nn.Module], None]) -> Planted:
    """What a rank has built."""

    def plant() -> AbstractContextManager[object]:
        make = layouts.engine_of

        def changed(parts: Any) -> ModelRuntime:
            change(parts.module)
            return make(parts)

        return patch.object(layouts, "engine_of", changed)

    return plant


def _method(owner: Any, name: str, around: Callable[..., Callable[..., Any]]) -> Planted:
    return lambda: patch.object(owner, name, around(getattr(owner, name)))


def _value(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    @torch.no_grad()
    def plant(module: nn.Module) -> None:
        tensor = {**dict(module.named_parameters()), **dict(module.named_buffers())}[name]
        tensor.copy_(change(tensor.clone()))

    return plant


def _hooked(name: str) -> Callable[[nn.Module], None]:
    def plant(module: nn.Module) -> None:
        dict(module.named_parameters())[name].register_hook(lambda g: 2 * g)

    return plant


def _poked(at: Tensor, place: int, value: float) -> Tensor:
    at.view(-1)[place] += value
    return at


def _rows_swapped(x: Tensor) -> Tensor:
    return x[[1, 0, *range(2, len(x))]]


def _changed_of(change: Callable[[dict[Any, Tensor]], Mapping[Any, Tensor]]) -> Callable[..., Any]:
    """Around what a stage takes from another: tensors by value."""

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def received(self: Any, stage: int, batch: int) -> Mapping[Any, Tensor]:
            found = dict(real(self, stage, batch))
            return change(found) if len(found) > 1 else found

        return received

    return around


def _exchanged(found: dict[Any, Tensor]) -> dict[Any, Tensor]:
    (a, x), (b, y), *rest = found.items()
    return {a: y, b: x, **dict(rest)}


def _without_last(found: dict[Any, Tensor]) -> dict[Any, Tensor]:
    return dict(list(found.items())[:-1])


def _every(change: Callable[[Tensor], Tensor]) -> Callable[[dict[Any, Tensor]], dict[Any, Tensor]]:
    return lambda found: {v: change(x.clone()) if x.is_floating_point() else x for v, x in found.items()}


def _key(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, step, microbatch: real(self, step, microbatch + 1)


def _weights(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, batch, labels: 1 / len(self.task.weights)


def _too_heavy(real: Callable[..., Any]) -> Callable[..., Any]:
    def shares(self: GradientReducer) -> Tensor:
        found = real(self).clone()
        found[self.rank] *= 1.1
        return found

    return shares


def _shares(real: Callable[..., Any]) -> Callable[..., Any]:
    def shares(self: GradientReducer) -> Tensor:
        found = real(self)
        return torch.full_like(found, 1 / len(found))

    return shares


def _twice(real: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: TiedWeights, gradients: Any, pump: Any) -> None:
        real(self, gradients, pump)
        real(self, gradients, pump)

    return add


def _unsummed(real: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: TiedWeights, gradients: Mapping[str, Tensor], pump: Any) -> None:
        own = {name: gradients[name].clone() for name in self.holders if name in gradients}
        real(self, gradients, pump)  # the others wait for what is sent
        for name, gradient in own.items():
            gradients[name].copy_(gradient)

    return add


def _not_zeroed(real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(self: GradientReducer, window: Any) -> None:
        kept = [flat.clone() for flat in self.flats()]
        real(self, window)
        for flat, was in zip(self.flats(), kept, strict=True):
            flat.copy_(was)

    return opened


def _one_backward_left_out(real: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: InFlight, gradients: Any, *, loss: Tensor | None = None) -> Any:
        return real(self, {v: torch.zeros_like(g) for v, g in gradients.items()}, loss=loss)

    count = [0]

    def every_second(self: InFlight, gradients: Any, *, loss: Tensor | None = None) -> Any:
        count[0] += 1
        return (real if count[0] % 2 else backward)(self, gradients, loss=loss)

    return every_second


def _twice_forward(real: Callable[..., Any]) -> Callable[..., Any]:
    def loss(self: ModelRuntime, rows: Any, *, step: int, key: int) -> Tensor:
        for unit in self.module.modules():
            if isinstance(unit, Pair):
                unit.calls += 1
        return real(self, rows, step=step, key=key)

    return loss


def _unmasked(real: Callable[..., Any]) -> Callable[..., Any]:
    def loss(self: ModelRuntime, rows: Any, *, step: int, key: int) -> Tensor:
        return real(self, {**rows, "attention_mask": torch.ones_like(rows["attention_mask"])}, step=step, key=key)

    return loss


def _stale(real: Callable[..., Any]) -> Callable[..., Any]:
    def loss(self: ModelRuntime, rows: Any, *, step: int, key: int) -> Tensor:
        before = {n: b.clone() for n, b in self.module.named_buffers()}
        try:
            return real(self, rows, step=step, key=key)
        finally:
            with torch.no_grad():
                for name, buffer in self.module.named_buffers():
                    if buffer.stride() != (0,):
                        buffer.copy_(before[name])

    return loss


def _shifted(real: Callable[..., Any]) -> Callable[..., Any]:
    def loss(self: NextToken, output: Any, batch: Any) -> Tensor:
        labels = batch["labels"].clone()
        labels[:, 1:] = torch.where(labels[:, 1:] == -100, 0, labels[:, 1:])  # void ones count
        return real(self, output, {**batch, "labels": labels})

    return loss


def _half(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


MIX, SIDE = "blocks.1.mix.weight", "blocks.2.side.weight"

# Two stages: rank 0 has the embedding and blocks 0 and 1, rank 1 blocks 2 and 3, the norm and the head, and so the
# embedding's weight, which is the head's.
FAULTS: dict[str, Planting] = {
    "a gradient 0.999 times": Planting(_gradient(MIX, lambda g: 0.999 * g), MIX, (0,)),
    "a gradient of the other sign": Planting(_gradient(SIDE, torch.neg), SIDE),
    "a gradient that is zero": Planting(_gradient("last.weight", torch.zeros_like), "last.weight"),
    "one entry of a gradient off": Planting(_gradient(MIX, lambda g: _poked(g, 5, 0.01)), MIX, (0,)),
    "rows of a gradient exchanged": Planting(_gradient(SIDE, _rows_swapped), SIDE),
    "a gradient transposed": Planting(_gradient(SIDE, lambda g: g.T.contiguous()), SIDE),
    "a gradient in bfloat16": Planting(_gradient(MIX, _half), MIX, (0,)),
    "a gradient that is not finite": Planting(_gradient(SIDE, lambda g: _poked(g, 0, float("nan"))), SIDE),
    "a tied sum left out": Planting(_method(TiedWeights, "add", _unsummed), "embed.weight"),
    "a tied sum twice": Planting(_method(TiedWeights, "add", _twice), "embed.weight", (0, 1)),
    "a hook twice": Planting(_built(_hooked(SIDE)), SIDE),
    "a parameter that is another": Planting(_built(_value(MIX, lambda p: _poked(p, 3, 1e-4))), MIX, (0,)),
    "a bias that is zero": Planting(_built(_value("blocks.3.mix.bias", torch.zeros_like)), "blocks.3.mix.bias"),
    "a buffer that is another": Planting(_built(_value("blocks.2.level", lambda b: b + 0.1)), "blocks.2.level"),
    "a stale buffer": Planting(_method(ModelRuntime, "loss", _stale), "blocks.2"),
    "a counter too far": Planting(_method(ModelRuntime, "loss", _twice_forward), "blocks.2"),
    "borders exchanged": Planting(_method(StepP2P, "received", _changed_of(_exchanged)), "as stage 1 receives it"),
    "a border in bfloat16": Planting(
        _method(StepP2P, "received", _changed_of(_every(_half))), "as stage 1 receives it"
    ),
    "an edge's gradient missing": Planting(
        _method(StepP2P, "gradients", _changed_of(_without_last)), "blocks.1.side", (0,)
    ),
    "edges' gradients exchanged": Planting(
        _method(StepP2P, "gradients", _changed_of(_exchanged)), "blocks.1.side", (0,)
    ),
    "edges' gradients twice": Planting(
        _method(StepP2P, "gradients", _changed_of(_every(lambda g: 2 * g))), "blocks.1.side", (0,)
    ),
    "edges' gradients in bfloat16": Planting(
        _method(StepP2P, "gradients", _changed_of(_every(_half))), "blocks.1.side", (0,)
    ),
    "another key of randomness": Planting(_method(UnitSeeds, "at", _key), "blocks.2"),
    "micro-batches of equal weight": Planting(_method(StepRunner, "_part", _weights), "head.bias"),
    "a gradient not zeroed": Planting(_method(GradientReducer, "open", _not_zeroed), "head.bias"),
    "a backward left out": Planting(_method(InFlight, "backward", _one_backward_left_out), "blocks.1", (0,)),
    "padding not masked": Planting(_method(ModelRuntime, "loss", _unmasked), "blocks.2"),
    "void labels that count": Planting(_method(NextToken, "__call__", _shifted), "loss"),
    "a wrong weight of a replica": Planting(
        _method(GradientReducer, "shares", _too_heavy), "head.bias", (3,), replicas=2
    ),
    "replicas of equal weight": Planting(
        _method(GradientReducer, "shares", _shares), "head.bias", (0, 1, 2, 3), replicas=2
    ),
}


@contextmanager
def planted(name: str, rank: int) -> Iterator[None]:
    """The fault is in the layout that a proof runs on this rank."""
    fault = FAULTS[name]
    answer = DividedSide.answer

    def answered(self: DividedSide, question: Any) -> Any:
        with ExitStack() as stack:
            if rank in fault.ranks:
                stack.enter_context(fault.plant())
            return answer(self, question)

    with patch.object(DividedSide, "answer", answered):
        yield
