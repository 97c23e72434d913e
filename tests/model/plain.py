"""Modules as people write them, none of which knows that it will be cut, and batches for them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 16, 24


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(6, WIDTH, generator=_random(seed))}


def images(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, 16, 16, generator=_random(seed))}


def tokens(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, WORDS, (3, 9), generator=_random(seed))
    ids[1, 6 + seed % 3 :] = 0  # padded, not always as far
    return {"tokens": ids}


def pairs(seed: int) -> dict[str, Tensor]:
    return {"source": tokens(seed)["tokens"], "target": tokens(seed + 100)["tokens"][:, :7]}


def graphs(seed: int) -> dict[str, Tensor]:
    """Two graphs of 4 and 5 nodes: features (nodes, WIDTH), edges (2, 20), the graph of every node."""
    edges = torch.cat([torch.randint(0, 4, (2, 10), generator=_random(seed)),
                       torch.randint(4, 9, (2, 10), generator=_random(seed + 1))], 1)  # fmt: skip
    nodes = torch.randn(9, WIDTH, generator=_random(seed + 2))
    return {"nodes": nodes, "edges": edges, "graph": torch.tensor([0] * 4 + [1] * 5)}


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTH, 3))


class BasicBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)
        self.downsample: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride=stride), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += identity
        return self.relu(x)


class ResNet(nn.Module):
    """Stages of blocks in nn.Sequential, a stem, a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(6, 6), BasicBlock(6, 6))
        self.layer2 = nn.Sequential(BasicBlock(6, 8, 2), BasicBlock(8, 8))
        self.layer3 = nn.Sequential(BasicBlock(8, 10, 2), BasicBlock(10, 10))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DoubleConv(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(inner, outer, 2, stride=2), DoubleConv(2 * outer, outer)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    """Named children, no list anywhere; every skip is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.outc = DoubleConv(3, 4), nn.Conv2d(4, 2, 1)
        self.down1, self.down2 = (
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 6)),
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(6, 8)),
        )
        self.up1, self.up2 = Up(8, 6), Up(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class Translator(nn.Module):
    """nn.Transformer's parts: padding masks from tokens, a causal mask, memory that every decoder layer reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 24, "dropout": dropout, "batch_first": True}
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.place = nn.Parameter(0.1 * torch.randn(1, 12, WIDTH))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2, nn.LayerNorm(WIDTH))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 3, nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * math.sqrt(WIDTH) + self.place[:, : ids.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding, causal = source == 0, nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(self._embedded(source), src_key_padding_mask=padding)
        x = self.decoder(self._embedded(target), memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return self.head(x)


class Messages(nn.Module):
    """One round of message passing, mean over the edges that arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = torch.relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        total = torch.zeros_like(nodes).index_add(0, target, messages)
        count = torch.zeros(len(nodes), 1).index_add(0, target, torch.ones(len(target), 1))
        return torch.relu(self.update(torch.cat([nodes, total / count.clamp(min=1)], -1)))


class GraphNet(nn.Module):
    """Residual rounds, then a sum over the nodes of each graph; how many graphs there are is read from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.rounds = nn.ModuleList(Messages() for _ in range(4))
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        nodes = self.inlet(nodes)
        for one in self.rounds:
            nodes = nodes + one(nodes, edges)
        pooled = nodes.new_zeros(int(graph.max()) + 1, WIDTH)
        return self.readout(pooled.scatter_add(0, graph[:, None].expand_as(nodes), nodes))


class Attention(nn.Module):
    """A pre-norm block that takes a mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        y, _ = self.attend(y, y, y, attn_mask=mask, need_weights=False)
        x = x + y
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A ModuleDict with a list in it, head tied to the embedding, causal mask and weights from its own code."""

    def __init__(self, layers: int = 3, dropout: float = 0.0, *, functional: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "words": nn.Embedding(WORDS, WIDTH),
                "places": nn.Embedding(12, WIDTH),
                "drop": nn.Dropout(dropout),
                "blocks": nn.ModuleList(Attention(dropout) for _ in range(layers)),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.functional = functional  # the tied head is no module, but a call with the embedding's weight
        if not functional:
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.body["words"].weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.body["words"](tokens) + self.body["places"](torch.arange(length))
        x = self.body["drop"](x)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        for block in self.body["blocks"]:
            x = block(x, mask=mask)
        x = self.body["norm"](x)
        return F.linear(x, self.body["words"].weight) if self.functional else self.head(x)


class Inner(nn.Module):
    """No list, no nn.Sequential: children by name, one of which has children of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.out(torch.sigmoid(self.gate(x)) * self.value(x))


class Wrapper(nn.Module):
    """All there is lies in its only child."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 0.5
