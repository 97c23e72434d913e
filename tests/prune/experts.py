"""Small mixtures of experts: a plain module, and configs of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
FUSED: dict[str, dict[str, Any]] = {
    "mixtral": SIZES | {"num_local_experts": 4},
    "olmoe": SIZES | {"num_experts": 4},
    "qwen2_moe": SIZES | {"num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_moe": SIZES | {"num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "gpt_oss": SIZES | {"num_local_experts": 4},  # turned, with biases, gates and ups interleaved
}


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


class Mixture(nn.Module):
    """The best `chosen` of `count` experts for each token; `gate`: a constant weight in place of the router's."""

    def __init__(self, width: int = 8, count: int = 4, chosen: int = 2, gate: float | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Expert(width, 2 * width) for _ in range(count))
        self.chosen, self.gate = chosen, gate

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, h.shape[-1])
        weights, which = self.weights(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(which == number)
            if len(rows):
                y = expert(x[rows])
                y *= weights[rows, place, None]  # in place, as some models do
                out = out.index_add(0, rows, y)
        return h + out.view(h.shape)

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = self.router(x).softmax(-1).topk(self.chosen, -1)
        weights = best.values / best.values.sum(-1, keepdim=True)
        return weights if self.gate is None else torch.full_like(weights, self.gate), best.indices


class Block(nn.Module):
    def __init__(self, gate: float | None) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(8, 8), Mixture(gate=gate)

    def forward(self, h: Tensor) -> Tensor:
        found: Tensor = self.moe(torch.tanh(self.mix(h)))
        return found


class MixtureModel(nn.Module):
    """Embedding, blocks of a linear layer and a mixture, head; forward(x) gives logits."""

    def __init__(self, layers: int = 2, gate: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Block(gate) for _ in range(layers))
        self.head = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(h)
        return found


def of_transformers(kind: str, **more: Any) -> nn.Module:
    """A random model of a type of transformers, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**FUSED[kind], **more})
    module: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # biases start at 0, and small weights give nearly equal routes
        for one in module.parameters():
            one.add_(0.2 * torch.randn(one.shape))
    return module.eval()


def ids(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(seed))
