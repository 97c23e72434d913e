"""HyperInterval: tasks in turn, each with a box of embeddings in which its loss is bounded (Krukowski et al. 2024).

Paper: Krukowski, Bielawska, Ksiazek, Wawrzynski, Batorski, Spurek: HyperInterval, arXiv:2405.15444.
Equations: task t has the box e_t +- r_t, r_t = kappa softmax(rho_t) (its radii sum to kappa); the hypernetwork maps it
    by interval arithmetic to an interval of the target network's weights theta = theta_0 + H(box), whose logits on a
    point x are an interval. e_t = r_t tanh(a_t) if shared, so that every box holds the embedding 0; else e_t = a_t.
    loss = (1 - lambda) CE(center) + lambda CE(worst case) + beta mean over old tasks |ends of H(box_s) - stored ends|^2
    Afterwards one embedding in the intersection of all boxes serves all tasks. Those of old tasks are not trained.
Symbols: theta_0 the target's weights as such a network starts, fixed; H two linear layers with a ReLU, called once for
    each chunk of theta with a chunk's embedding (a point) beside e_t.
What holds: whatever embedding is taken of a box, theta is in the interval, and the worst case bounds its logits.
    Radius 0 is a plain hypernetwork. Dropout and batch norm have no bound of this kind, and the target has none.
Limits: intervals widen with every layer, of H and of the target; boxes that are not shared need not intersect, which
    is said and refused.
Unlike the paper: theta_0 is added, so that the target starts as an ordinary network does; tanh bounds centers by radii.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.ops.intervals import Interval, intersection, linear, linear_of_intervals, relu, worst_logits
from gossamer.spec.errors import bad_input

_KEY = "model.config"


class HyperInterval(nn.Module):
    """A hypernetwork of the weights of a target: linear layers of `sizes` (inputs, ..., classes) with ReLUs between.

    tasks: number of boxes; width: of embeddings; hidden: of H; chunk: weights that H returns at a time; kappa: sum of
    the radii of a box; shared: whether all boxes hold the embedding 0.
    """

    start: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        tasks: int,
        width: int = 16,
        hidden: int = 64,
        chunk: int = 512,
        kappa: float = 1.0,
        shared: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(*sizes, tasks, width, hidden, chunk) < 1 or kappa < 0:
            raise bad_input(
                wanted="sizes of two or more layers' ends and a kappa of at least 0",
                got=f"{list(sizes)}, kappa {kappa}",
                do="write (inputs, ..., classes), such as (64, 32, 10)",
                key=_KEY,
            )
        drawn = torch.Generator().manual_seed(seed)
        self.shapes = [shape for a, b in pairwise(sizes) for shape in ((b, a), (b,))]
        flat = [
            torch.randn(b, a, generator=drawn) * (2 / a) ** 0.5 if i == 0 else torch.zeros(b)
            for a, b in pairwise(sizes)
            for i in range(2)
        ]
        self.register_buffer("start", torch.cat([one.flatten() for one in flat]))
        count = -(-len(self.start) // chunk)
        self.kappa, self.shared = kappa, shared
        self.centers = nn.ParameterList(0.1 * torch.randn(width, generator=drawn) for _ in range(tasks))
        self.rho = nn.ParameterList(torch.zeros(width) for _ in range(tasks))
        self.chunks = nn.Parameter(torch.randn(count, width, generator=drawn))
        self.first = nn.Linear(2 * width, hidden)
        self.second = nn.Linear(hidden, chunk)
        with torch.no_grad():
            for layer, gain in ((self.first, 1.0), (self.second, 0.1)):
                layer.weight.copy_(gain * torch.randn(layer.weight.shape, generator=drawn) / layer.in_features**0.5)
                layer.bias.zero_()

    def box(self, task: int) -> Interval:
        """Return the box of a task: (width,)."""
        radius = self.kappa * torch.softmax(self.rho[task], -1)
        center = self.centers[task]
        return Interval(radius * torch.tanh(center) if self.shared else center, radius)

    def weights(self, box: Interval) -> Interval:
        """Return the interval of the target's weights, flat."""
        count = len(self.chunks)
        center = torch.cat([box.center.expand(count, -1), self.chunks], -1)
        radius = torch.cat([box.radius.expand(count, -1), torch.zeros_like(self.chunks)], -1)
        inner = relu(linear(Interval(center, radius), self.first.weight, self.first.bias))
        made = linear(inner, self.second.weight, self.second.bias)
        size = len(self.start)
        return Interval(self.start + made.center.flatten()[:size], made.radius.flatten()[:size])

    def logits(self, inputs: Tensor, weights: Interval) -> Interval:
        """Return the interval of the logits of inputs (rows, features)."""
        x = Interval(inputs, torch.zeros_like(inputs))
        parts = zip(self._parts(weights.center), self._parts(weights.radius), strict=True)
        layers = [Interval(center, radius) for center, radius in parts]
        for place in range(0, len(layers), 2):
            x = linear_of_intervals(x if place == 0 else relu(x), layers[place], layers[place + 1])
        return x

    def _parts(self, flat: Tensor) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [one.view(shape) for one, shape in zip(torch.split(flat, sizes), self.shapes, strict=True)]

    def at(self, embedding: Tensor, inputs: Tensor) -> Tensor:
        """Return the logits of the target that a plain hypernetwork makes of one embedding."""
        return self.logits(inputs, self.weights(Interval(embedding, torch.zeros_like(embedding)))).center

    def forward(self, inputs: Tensor, task: int = 0) -> Tensor:
        return self.at(self.box(task).center, inputs)

    def loss(
        self,
        inputs: Tensor,
        labels: Tensor,
        task: int,
        stored: Sequence[Interval] = (),
        *,
        worst: float = 0.5,
        beta: float = 0.01,
    ) -> Tensor:
        """Return the loss of a batch of `task`; `stored`: `weights` of the boxes of the tasks before, when they ended.

        worst: lambda. beta: weight of the ends' squared distances, summed over weights, mean over old tasks.
        """
        found = self.logits(inputs, self.weights(self.box(task)))
        plain = F.cross_entropy(found.center, labels)
        total = (1 - worst) * plain + worst * F.cross_entropy(worst_logits(found, labels), labels)
        if not stored:
            return total
        moved = []
        for old, before in enumerate(stored):
            now = self.weights(Interval(self.box(old).center.detach(), self.box(old).radius.detach()))
            moved.append((now.lower - before.lower).square().sum() + (now.upper - before.upper).square().sum())
        return total + beta * torch.stack(moved).mean()

    @torch.no_grad()
    def stored(self, task: int) -> Interval:
        """Return the interval of the weights of a task that has ended, for `loss` of the tasks that follow."""
        found = self.weights(self.box(task))
        return Interval(found.center.clone(), found.radius.clone())

    @torch.no_grad()
    def universal(self, tasks: int) -> Tensor:
        """Return the center of the intersection of the first boxes. Raises BadInput where they have none in common."""
        found = intersection([self.box(task) for task in range(tasks)])
        if found is None:
            raise bad_input(
                wanted=f"boxes of {tasks} tasks with an embedding in common",
                got="boxes that do not intersect",
                do="set shared, or a larger kappa",
                key=_KEY,
            )
        return found.center
