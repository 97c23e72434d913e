"""Modules that pass things on in the many ways people use: tuples, records, masks, buffers, shared blocks, losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.plain import WIDTH, WORDS, Attention


class Dense(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


class Universal(nn.Module):
    """Two blocks, both called in every round: weights shared over depth."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__()
        self.inlet, self.rounds = nn.Linear(WIDTH, WIDTH), rounds
        self.blocks = nn.ModuleList([Dense(), Dense()])
        self.outlet = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return self.outlet(x)


class SharedList(nn.Module):
    """One module object at several places of a list, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        one, other = Dense(), Dense()
        self.layers = nn.ModuleList([one, other, one, one])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Glued(nn.Module):
    """Much happens between the blocks: norms, gates of its own parameters, noise, in-place terms, skips."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dense() for _ in range(4))
        self.gates, self.noise = nn.Parameter(torch.rand(4, WIDTH)), noise
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = x = F.layer_norm(x, (WIDTH,)) * self.scale
        for i, block in enumerate(self.blocks):
            gate = torch.sigmoid(self.gates[i])
            x = gate * block(F.gelu(x)) + (1 - gate) * x
            x *= 0.9
            x = F.dropout(x + 0.1 * first, self.noise, self.training)
            first = torch.roll(first, 1, -1)
        return F.normalize(x, dim=-1)


class TwoTasks(nn.Module):
    """Several outputs: two heads, one of them after half of the blocks, and a penalty from every block's tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Penalised() for _ in range(4))
        self.early, self.heads = nn.Linear(WIDTH, 2), nn.ModuleDict({"a": nn.Linear(WIDTH, 3), "b": Dense()})

    def forward(self, x: Tensor) -> dict[str, Any]:
        penalties, states = [], []
        for block in self.trunk:
            x, penalty = block(x)
            penalties.append(penalty)
            states.append(x)
        outputs = {name: head(x) for name, head in self.heads.items()}
        return outputs | {"early": self.early(states[1]), "penalty": sum(penalties), "states": tuple(states[::2])}


class Penalised(Dense):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, x.square().mean()


class Kept(Dense):
    """Keeps its share of the loss as an attribute, for whoever asks."""

    share: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.share = x.abs().mean()
        return x


class AttributeLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Kept() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.stack([m.share for m in self.modules() if isinstance(m, Kept)]).sum()


@dataclass
class State:
    """What blocks hand on."""

    hidden: Tensor
    memory: Tensor | None
    depth: int = 0


class Pair(NamedTuple):
    hidden: Tensor
    extra: dict[str, Tensor]


class Recorded(Dense):
    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden = super().forward(state.hidden if state.memory is None else state.hidden + state.memory)
        return State(hidden, hidden.flip(0), state.depth + 1)


class Paired(Dense):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]
        hidden = super().forward(pair.hidden + sum(pair.extra.values()))
        return Pair(hidden, {"last": pair.hidden, "mean": hidden.mean(0, keepdim=True)})


class Records(nn.Module):
    """Blocks of dataclasses, then blocks of named tuples that hold dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList(Recorded() for _ in range(3)), nn.ModuleList(Paired() for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = State(x, None)
        for block in self.first:
            state = block(state)
        pair = Pair(state.hidden / state.depth, {"memory": state.memory})
        for block in self.second:
            pair = block(pair)
        return {"x": pair.hidden, **pair.extra}


class Masked(nn.Module):
    """Padding mask from tokens, and a gate that its own code computes from what the embedding gave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        keep = (tokens != 0).float()
        x = self.embed(tokens)
        louder = x.norm(dim=-1, keepdim=True) > x.norm(dim=-1).mean()  # (batch, sequence, 1)
        bias = (1 - keep)[:, None, :].expand(-1, tokens.shape[1], -1).repeat_interleave(2, 0) * -1e4
        for block in self.blocks:
            x = torch.where(louder, block(x * keep[..., None], bias), 0.5 * x)
        return self.head((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


class Packed(nn.Module):
    """Padding is taken out before the blocks: how many rows they see is read from the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Dense() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        keep = tokens != 0
        x = self.embed(tokens)[keep]  # (tokens kept, WIDTH)
        for block in self.blocks:
            x = block(x)
        return torch.zeros(*tokens.shape, WIDTH).masked_scatter(keep[..., None], x)


class Counted(Dense):
    """A running mean written in place, another that is assigned anew, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            self.square = 0.9 * self.square + 0.1 * x.detach().square().mean(0)
            self.count += 1
        return super().forward((x - self.mean) / (self.square + 1e-3).sqrt())


class Running(nn.Module):
    """Buffers in blocks, and in the model itself: of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(4))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean(0)
        x = x - 0.1 * self.seen
        for block in self.blocks:
            x = block(x)
        return x


class Recurrent(nn.Module):
    """A recurrent front end, and cells that a loop over time calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.cells = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, (h, _) = self.lstm(self.embed(tokens))
        states = [h[0], h[1]]
        for time in range(3):
            y = x[:, time]
            for i, cell in enumerate(self.cells):
                y = states[i] = cell(y, states[i])
        return torch.stack(states)


class Patches(nn.Module):
    """A class token and places that are parameters of the model itself; weights under a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.Sequential(*(Attention() for _ in range(3)))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class PreActivation(nn.Module):
    """Writes into what it was given, as people do to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += self.norm(self.mix(torch.relu(x)))
        return x


class Rectifying(PreActivation):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(F.relu_(x)))


class InPlace(nn.Module):
    """Blocks that change their argument; `skip` is the same tensor under another name."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = x * 1.5
        for block in self.blocks:
            skip = x
            x = block(x)
        return self.head(x + skip)
