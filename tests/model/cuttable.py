"""Modules of many shapes, none of which knows that it will be cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 12


def rows(seed: int = 0, count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def image(seed: int = 0) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    def __init__(self, out: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, out)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.drop(self.mix(x)))


class Chain(nn.Module):
    """Blocks with the model's own code between them: a scaling, and a term in place."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(dropout=dropout) for _ in range(layers))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = x = x * self.scale
        for block in self.blocks:
            x = block(x) * self.scale
            x += 0.1 * first
        return self.head(x)


def sequential() -> nn.Module:
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.second(self.act(self.norm(self.first(x)))))


class ResidualCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(*(Residual(8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(F.relu_(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, stride=2, padding=1) for _ in range(2))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(2))
        self.outlet = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.inlet(x), []
        for down in self.down:
            skips.append(x)
            x = torch.relu(down(x))
        x = torch.relu(self.middle(x))
        for up in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = torch.relu(up(torch.cat([x, skips.pop()], 1)))
        return self.outlet(x)


class CrossLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, memory: Tensor) -> dict[str, Tensor]:
        return {"state": torch.tanh(self.own(x) + self.cross(memory)), "memory": memory}


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(CrossLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        x = x.flip(0)
        for layer in self.decoder:
            given = layer(x, memory=memory)
            x, memory = given["state"], given["memory"]
        return self.head(x)


class Gnn(nn.Module):
    """Messages along edges; the graph goes through the model's own code, and edge states through the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(GnnLayer() for _ in range(4))
        self.readout = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        nodes = torch.arange(len(x))
        graph = torch.stack([nodes, nodes.roll(1)])  # (2, edges)
        links = self.edge(torch.cat([x[graph[0]], x[graph[1]]], 1))
        for layer in self.layers:
            x, links = layer(x, links, graph)
        return self.readout(x).sum()


class GnnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node, self.link = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, links: Tensor, graph: Tensor) -> tuple[Tensor, Tensor]:
        messages = torch.tanh(self.link(links) + x[graph[0]])
        return x + torch.zeros_like(x).index_add_(0, graph[1], self.node(messages)), links + messages


class Shared(nn.Module):
    """One block called three times between others, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.common = Layer()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outlet.weight = self.inlet.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = self.common(block(x))
        return self.outlet(x)


class Expert(nn.Module):
    """Keeps a balance loss where its model finds it later."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mix = nn.Sequential(nn.Linear(WIDTH, 4)), nn.Linear(WIDTH, WIDTH)
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        self.balance = weights.mean(0).square().sum()
        return x + self.mix(x) * weights[:, :1]


class Experts(nn.Module):
    """Its loss reads an attribute of every block, and what a hook collected inside of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        watched = [m for b in self.blocks for m in (b.router, b.router[0])]  # one tensor, seen twice
        hooks = [m.register_forward_hook(lambda _, __, out: seen.append(out)) for m in watched]
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return x.square().mean() + sum(b.balance for b in self.blocks) + torch.cat(seen).square().mean()


class Writing(Layer):
    def forward(self, x: Tensor, kept: list[Tensor], *, states: dict[str, Any]) -> Tensor:  # type: ignore[override]
        mixed = self.mix(x)
        kept.append(mixed)
        states[f"{len(kept) % 2}"] = (mixed * 2, x)
        return torch.tanh(x + (states["0"][0] if "0" in states else mixed))


class Passing(nn.Module):
    """Blocks write into a list and a dict that later ones, and the end, read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writing() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        states: dict[str, Any] = {}
        for block in self.blocks:
            x = block(x, kept, states=states)
        return x + torch.stack(kept).mean(0) + states["1"][1]


MODULES = {
    "passing": (Passing, rows),
    "sequential": (sequential, rows),
    "chain": (Chain, rows),
    "residual_cnn": (ResidualCnn, image),
    "u_net": (UNet, image),
    "encoder_decoder": (EncoderDecoder, rows),
    "gnn": (Gnn, rows),
    "shared": (Shared, rows),
    "experts": (Experts, rows),
}
