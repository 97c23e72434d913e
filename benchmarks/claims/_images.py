"""Handwritten digits to train in seconds on one core: an autoencoder, and a classifier of convolutions.

autoencoder   the 64 pixels through 8 numbers and back, six linear layers with tanh; loss: cross entropy summed over
              the pixels, of the images that it is trained on, as tables of second-order methods have it
convolutions  two convolutions and two linear layers with ReLU; loss: cross entropy of images that are held out
normalized    the same with batch normalization after every convolution
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from claims._digits_cnn import CLASSES, SIDE, parts
from gossamer.model.layer_vectors import LayerHooks
from gossamer.optimizer import LayerVectors, Optimizer

Update = Callable[[Mapping[str, Tensor], float], None]  # given the gradients and the factor on the rate


@dataclass(frozen=True, slots=True)
class Images:
    """`judged`: the part whose loss is told."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    judged: str
    batch: int
    steps: int


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (SIDE**2, 96, 32, 8, 32, 96, SIDE**2)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number in (2, len(self.layers) - 1) else torch.tanh(layer(x))
        return x


class Convolutions(nn.Module):
    def __init__(self, width: int = 12, *, is_normalized: bool) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(w) if is_normalized else nn.Identity() for w in (width, 2 * width)]
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=not is_normalized),
            norms[0],
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=not is_normalized),
            norms[1],
            nn.ReLU(),
        )
        self.inner, self.last = nn.Linear(2 * width * (SIDE // 2) ** 2, 48), nn.Linear(48, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(self.body(images).flatten(1))))


def _same(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    del labels
    x = images.flatten(1)
    return binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)


def _class(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(images), labels)


AUTOENCODER = Images("autoencoder", Autoencoder, _same, "train", 128, 400)
CONVOLUTIONS = Images("convolutions", lambda: Convolutions(is_normalized=False), _class, "validation", 128, 120)
NORMALIZED = Images("normalized", lambda: Convolutions(is_normalized=True), _class, "validation", 128, 120)
_parts = cache(parts)


def followed(
    task: Images, made: Callable[[nn.Module], Trained], *, seed: int, evaluations: int, steps: int = 0
) -> list[tuple[int, float]]:
    """Train from the weights of a seed on the order of a seed; return the evaluations as (steps, loss).

    The rate rises over a twentieth of the steps and falls along a cosine to nothing. A run ends where its loss is not
    finite, or a rule cannot decompose its matrices.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, steps = task.build(), steps or task.steps
    trained = made(model)
    due = {round((k + 1) * steps / evaluations) for k in range(evaluations)}
    found: list[tuple[int, float]] = []
    for step, (images, labels) in enumerate(_batches(task, seed, steps)):
        rise, fall = (step + 1) / max(1, steps // 20), 0.5 + 0.5 * math.cos(math.pi * step / steps)
        try:
            loss = trained.step(task, images, labels, min(rise, fall))
        except torch.linalg.LinAlgError:  # a root of what is not finite any more
            break
        if not math.isfinite(loss):
            break
        if step + 1 in due:
            found.append((step + 1, judged(task, model)))
    return found


class Trained:
    """A model in training by a rule of this package, or by one of torch's form (`theirs`)."""

    def __init__(self, model: nn.Module, *, rule: Optimizer | None = None, theirs: torch.optim.Optimizer | None = None):
        self.model, self.rule, self.theirs = model, rule, theirs
        self.params = dict(model.named_parameters())
        self.state = rule.init(self.params) if rule else {}
        self.hooks = LayerHooks.of(model, rule.wants_vectors(self.params) if rule else ())
        self.rates = [group["lr"] for group in theirs.param_groups] if theirs else []
        self.done = 0

    def step(self, task: Images, images: Tensor, labels: Tensor, scale: float) -> float:
        """Take one step at `scale` of the rate; return the loss before it."""
        with self.hooks.open():
            loss = task.loss(self.model, images, labels)
            grads = torch.autograd.grad(loss, list(self.params.values()))
        if self.rule:
            vectors = {n: LayerVectors(s.input / s.positions, s.output) for n, s in self.hooks.sums.items()}
            self.rule.see(vectors, self.state)
            by_name = dict(zip(self.params, grads, strict=True))
            self.rule.update(self.params, by_name, self.state, lr_scale=scale, step=self.done)
        if self.theirs:
            for param, grad in zip(self.params.values(), grads, strict=True):
                param.grad = grad
            for group, rate in zip(self.theirs.param_groups, self.rates, strict=True):
                group["lr"] = rate * scale
            self.theirs.step()
        self.done += 1
        return float(loss.detach())


@torch.no_grad()
def judged(task: Images, model: nn.Module) -> float:
    """Return the loss of the judged part, as in evaluation."""
    model.eval()
    loss = float(task.loss(model, *_parts()[task.judged]))
    model.train()
    return loss


def seconds_of_steps(
    task: Images, made: Mapping[str, Callable[[nn.Module], Trained]], *, turns: int, each: int = 10
) -> dict[str, list[float]]:
    """Return processor seconds of a step by name and turn: `each` steps a turn, after one turn to get warm."""
    torch.set_num_threads(1)
    sides = {name: one(task.build()) for name, one in made.items()}
    batches = list(_batches(task, 0, each))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            for images, labels in batches:
                sides[name].step(task, images, labels, 0.01)
            if turn:
                found[name].append((time.process_time() - began) / each)
    return found


def steps_to(target: float, evaluations: Sequence[Sequence[float]]) -> float:
    """Return the steps of the first evaluation at the target or below, else infinity."""
    return next((steps for steps, loss in evaluations if loss <= target), math.inf)


def _batches(task: Images, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = _parts()["train"]
    drawn = torch.Generator().manual_seed(2_000 + seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < task.batch:
            order = torch.randperm(len(labels), generator=drawn)
        yield images[order[: task.batch]], labels[order[: task.batch]]
        order = order[task.batch :]
