"""A small byte LM of the standard library's text, trained in this process on one core, on one island or on several.

The model is a Llama-like decoder (RMS norms, rotary positions, SwiGLU-free: GELU), the data what `data.source: stdlib`
reads. A seed fixes the weights at the start and the order of the data, so methods with one seed are a pair. Islands are
simulated one after the other: island i gets its part of every global batch, so all methods see the same bytes.
Seconds are those of the processor (`time.process_time`), without evaluations: other programs do not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, rms_norm, scaled_dot_product_attention

from gossamer import optimizer as optimizer_methods
from gossamer.data.source.stdlib import Stdlib
from gossamer.optimizer import Optimizer
from gossamer.optimizer.common_adamw import CommonAdamW
from gossamer.sync import outer as outer_methods
from gossamer.sync.outer import OuterStep

VALIDATION = 1024  # sequences
_EVERY = 25  # a document of so many is for validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    width: int
    layers: int
    heads: int = 4
    context: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """Local-update training. `outer`: an outer optimizer as in a plan; `moments_every`: rounds between averages of the
    second moments, 0 for none."""

    count: int
    sync_every: int
    outer: Any = "average"
    moments_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. `tokens`: of a step of all islands together; `optimizer` as in a configuration, with its rate.

    The rate rises over a tenth of the steps and falls to a tenth of itself by a cosine. `evaluations`: beside the last.
    """

    shape: Shape
    optimizer: Any
    steps: int
    tokens: int
    seed: int = 0
    islands: Islands | None = None
    clip: float = 1.0
    evaluations: int = 0

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in Lm(self.shape).parameters())

    def told(self) -> str:
        shape = f"{self.shape.layers} layers of {self.shape.width}, {self.parameters:,} parameters"
        size = f"{self.steps} steps of {self.tokens:,} tokens"
        return f"byte LM of {shape}; {size}; loss of {VALIDATION} validation sequences of {self.shape.context} bytes"


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(shape.width)), nn.Parameter(torch.ones(shape.width))
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(rms_norm(x, (width,), self.norm1)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k = (_turned(one.transpose(1, 2), turn) for one in (q, k))
        mixed = scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(rms_norm(x, (width,), self.norm2))))


class Lm(nn.Module):
    """Names are those by which optimizers tell embeddings, heads and fused projections from other matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.head = nn.Linear(shape.width, 256, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                depth = 2 * shape.layers if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(param, std=(param.shape[1] * depth) ** -0.5)

    def forward(self, bytes_: Tensor) -> Tensor:
        x, turn = self.embed(bytes_), _turn(self.shape.context, self.shape.width // self.shape.heads)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(rms_norm(x, (self.shape.width,), self.norm))


@cache
def _turn(length: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    (a, b), (cos, sin) = x.chunk(2, -1), turn
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@cache
def text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those to validate on: every 25th document, from all over the library."""
    parts: tuple[list[str], list[str]] = ([], [])
    for number, document in enumerate(Stdlib().documents()):
        parts[number % _EVERY == 0].append(document.text)
    train, held = ("\n".join(part).encode() for part in parts)
    return tuple(torch.frombuffer(bytearray(one), dtype=torch.uint8).long() for one in (train, held))  # type: ignore[return-value]


def batches(seed: int, rows: int, context: int, steps: int) -> Iterator[Tensor]:
    """The global batches of a seed: rows of context + 1 bytes from random places."""
    train, _ = text()
    drawn = torch.Generator().manual_seed(1_000 + seed)
    for _ in range(steps):
        starts = torch.randint(0, len(train) - context - 1, (rows,), generator=drawn)
        yield train[starts[:, None] + torch.arange(context + 1)]


@torch.no_grad()
def validation_loss(model: nn.Module, context: int) -> float:
    """Nats per byte of evenly spaced sequences of the whole validation text."""
    _, held = text()
    starts = torch.linspace(0, len(held) - context - 1, VALIDATION).long()
    rows = held[starts[:, None] + torch.arange(context + 1)]
    losses = [float(loss_of(model, part)) * len(part) for part in rows.split(64)]
    return sum(losses) / VALIDATION


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rate_at(step: int, steps: int) -> float:
    """Return the factor on the learning rate."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def trained(run: Run) -> dict[str, Any]:
    """Return the loss of the end, the seconds, and the evaluations as (seconds, loss)."""
    torch.set_num_threads(1)
    text()
    torch.manual_seed(run.seed)
    model = Lm(run.shape)
    params = dict(model.named_parameters())
    world = _World(params, run)
    seen, seconds = [], 0.0
    due = {round((k + 1) * run.steps / (run.evaluations + 1)) for k in range(run.evaluations)} | {run.steps}
    for step, rows in enumerate(batches(run.seed, run.tokens // run.shape.context, run.shape.context, run.steps)):
        began = time.process_time()
        world.step(model, rows, step)
        seconds += time.process_time() - began
        if step + 1 in due:
            seen.append((round(seconds, 3), validation_loss(world.load(params, model), run.shape.context)))
    return {"loss": seen[-1][1], "seconds": round(seconds, 2), "evaluations": seen}


class _World:
    """All islands: their parameters and states, and the global parameters."""

    def __init__(self, params: Mapping[str, nn.Parameter], run: Run) -> None:
        self.run, self.islands = run, run.islands or Islands(count=1, sync_every=1)
        self.params = params
        rule: Optimizer = optimizer_methods.build(run.optimizer)
        if self.islands.moments_every:
            rule = CommonAdamW.around(rule, 1 / self.islands.count)
        self.rule = rule
        self.local = [{n: p.detach().clone() for n, p in params.items()} for _ in range(self.islands.count)]
        self.states = [rule.init(one) for one in self.local]
        self.anchor = {n: p.detach().clone() for n, p in params.items()}
        self.outer = None if run.islands is None else outer_methods.build(self.islands.outer)
        self.outer_state = {} if self.outer is None else self.outer.init(list(self.anchor.values()))
        self.rates, self.rounds = 0.0, 0

    def step(self, model: nn.Module, rows: Tensor, step: int) -> None:
        scale = rate_at(step, self.run.steps)
        update = self.rule.update if self.outer is None else self.rule.update_apart
        parts = rows.chunk(self.islands.count)
        for local, state, part in zip(self.local, self.states, parts, strict=True):
            grads = self._gradients(model, local, part)
            update(local, grads, state, lr_scale=scale, step=step)
        self.rates += scale * self.rule.lr
        if self.outer is not None and (step + 1 == self.run.steps or (step + 1) % self.islands.sync_every == 0):
            self._meet(step)

    def load(self, params: Mapping[str, nn.Parameter], model: nn.Module) -> nn.Module:
        """Return the model with the parameters to be evaluated: the global ones, or those of the only island."""
        for name, value in (self.local[0] if self.outer is None else self.anchor).items():
            params[name].data = value
        return model

    def _gradients(self, model: nn.Module, local: Mapping[str, Tensor], part: Tensor) -> dict[str, Tensor]:
        for name, param in self.params.items():
            param.data = local[name]
        found = torch.autograd.grad(loss_of(model, part), list(self.params.values()))
        norm = math.sqrt(sum(float(one.square().sum()) for one in found))
        if norm > self.run.clip:
            found = tuple(torch._foreach_mul(found, self.run.clip / norm))
        return dict(zip(self.params, found, strict=True))

    @torch.no_grad()
    def _meet(self, step: int) -> None:
        assert self.outer is not None
        mean = [a - torch.stack([one[n] for one in self.local]).mean(0) for n, a in self.anchor.items()]
        at = OuterStep(self.rounds, self.islands.sync_every, self.rates, (self.run.seed, self.rounds, 0))
        self.outer.step(list(self.anchor.values()), mean, self.outer_state, at)
        self.rounds, self.rates = self.rounds + 1, 0.0
        for local in self.local:
            for name, value in local.items():
                value.copy_(self.anchor[name])
        if self.islands.moments_every and self.rounds % self.islands.moments_every == 0:
            known = [self.rule.second_moments(state, step=step + 1) for state in self.states]
            common = {n: torch.stack([one[n] for one in known]).mean(0) for n in known[0]}
            for state in self.states:
                self.rule.learn(common, state)


def with_seed(run: Run, seed: int) -> Run:
    return replace(run, seed=seed)
