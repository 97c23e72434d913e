"""FIT: transformers over groups of tokens, interleaved with one over a few latents of each group (Chen and Li 2023).

Paper: Chen, Li: FIT, Far-reaching Interleaved Transformers, arXiv:2305.12689.
Equations, of a block on tokens x (groups, n, d) and latents z (groups, m, d):
    x <- local layers: causal self-attention and feedforward within each group
    z <- z + cross-attention(z, x of its own group) ;  z <- global layers: self-attention of all latents, group by group
    x <- x + cross-attention(x, z of the group before)
Symbols: L tokens in L / n groups of n; m latents per group; d width.
Causal: latents of a group have seen its tokens and those before, and its own tokens read the latents of the group
    before alone (the first group reads learned ones). So out_i is a function of in_j with j <= i.
Work of attention: L n + (L m / n)^2 score pairs per layer, least at n = (2 L m^2)^(1/3), then of order L^(4/3).
Memory: scores are not kept (torch's scaled_dot_product_attention), so activations grow with L.
With one group and no global layers it is a plain transformer.
Unlike the paper: rotary positions (of tokens in local layers, of groups in global ones) and RMS norms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.spec.errors import bad_input

_KEY = "model.config"


class Attention(nn.Module):
    """Multi-head attention of `x` (rows, queries, d) on `on` (rows, keys, d), with a norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_on = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, on: Tensor) -> Tensor:
        return _attended(self, self.norm(x), self.norm_on(on))


class Layer(nn.Module):
    """A pre-norm transformer layer: self-attention with rotary positions, then a feedforward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return x (rows, tokens, d). mask: (tokens, tokens) bool, what each token sees; None: those before it."""
        normed = self.norm(x)
        x = x + _attended(self, normed, normed, positions=positions, mask=mask, causal=mask is None)
        found: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return found


def _attended(
    of: Attention | Layer,
    x: Tensor,
    on: Tensor,
    *,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    q, k, v = (
        layer(given).unflatten(-1, (of.heads, -1)).transpose(1, 2)
        for layer, given in ((of.q, x), (of.k, on), (of.v, on))
    )
    if positions is not None:
        q, k = _turned(q, positions), _turned(k, positions)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    found: Tensor = of.out(mixed.transpose(1, 2).flatten(2))
    return found


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Return x (rows, heads, tokens, size) with rotary positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], -1)


class Block(nn.Module):
    """Local layers, and, if there are global ones, the way through the latents."""

    def __init__(self, width: int, heads: int, *, local: int, globals_: int) -> None:
        super().__init__()
        self.local = nn.ModuleList(Layer(width, heads) for _ in range(local))
        self.globals = nn.ModuleList(Layer(width, heads) for _ in range(globals_))
        self.gather = Attention(width, heads) if globals_ else None
        self.spread = Attention(width, heads) if globals_ else None

    def forward(self, x: Tensor, z: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (rows, groups, n, d) and latents (rows, groups, m, d). before: latents (m, d) of no group."""
        rows, groups, size, width = x.shape
        x = x.flatten(0, 1)
        for layer in self.local:
            x = layer(x, torch.arange(size, device=x.device))
        if self.gather is not None and self.spread is not None:
            count = z.shape[2]
            z = z.flatten(0, 1)
            z = (z + self.gather(z, x)).view(rows, groups * count, width)
            group = torch.arange(groups, device=x.device).repeat_interleave(count)
            for layer in self.globals:
                z = layer(z, group, group[:, None] >= group)
            z = z.view(rows, groups, count, width)
            shifted = torch.cat([before.expand(rows, 1, count, width), z[:, :-1]], 1)
            x = x + self.spread(x, shifted.flatten(0, 1))
        return x.view(rows, groups, size, width), z


class Fit(nn.Module):
    """A causal language model of FIT blocks. All sizes are those of `fit`."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int,
        heads: int,
        blocks: int,
        local: int,
        globals_: int,
        group: int,
        latents: int,
    ) -> None:
        super().__init__()
        self.group = group
        self.embed = nn.Embedding(vocabulary, width)
        self.latents = nn.Parameter(0.02 * torch.randn(latents, width)) if globals_ else None
        self.before = nn.Parameter(0.02 * torch.randn(latents, width)) if globals_ else None
        self.blocks = nn.ModuleList(Block(width, heads, local=local, globals_=globals_) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        rows, tokens = input_ids.shape
        groups = -(-tokens // self.group)
        size = min(self.group, tokens)  # one group that is not full is as long as it is
        padded = F.pad(input_ids, (0, groups * size - tokens))  # later tokens, which no token before sees
        x = self.embed(padded).view(rows, groups, size, -1)
        if self.latents is None or self.before is None:
            z = before = x.new_zeros(0)
        else:
            z, before = self.latents.expand(rows, groups, -1, -1), self.before
        for block in self.blocks:
            x, z = block(x, z, before)
        logits: Tensor = self.head(self.norm(x.flatten(1, 2)[:, :tokens]))
        return logits


def fit(
    vocabulary: int,
    *,
    width: int = 128,
    heads: int = 4,
    blocks: int = 2,
    local: int = 1,
    global_layers: int = 1,
    group: int = 64,
    latents: int = 4,
) -> Fit:
    """Return a FIT; a factory for `model.factory`, "gossamer.model.networks.fit:fit".

    blocks of `local` layers within groups of `group` tokens, and `global_layers` over `latents` latents of each group.
    """
    sizes = (vocabulary, width, heads, blocks, local, group, latents)
    if min(*sizes, global_layers + 1) < 1 or width % heads or (width // heads) % 2:
        raise bad_input(
            wanted="sizes of at least 1, global_layers of at least 0, and a width of an even size for each head",
            got=f"width {width}, heads {heads}, blocks {blocks}, local {local}, global_layers {global_layers}, "
            f"group {group}, latents {latents}",
            do="write width: 128, heads: 4",
            key=_KEY,
        )
    more = {"local": local, "globals_": global_layers, "group": group, "latents": latents}
    return Fit(vocabulary, width=width, heads=heads, blocks=blocks, **more)


def best_group(tokens: int, latents: int) -> float:
    """Return the group size n at which L n + (L m / n)^2 is least: (2 L m^2)^(1/3)."""
    return float((2 * tokens * latents**2) ** (1 / 3))


def score_pairs(tokens: int, group: int, latents: int) -> int:
    """Return L n + (L m / n)^2: query-key pairs of a local and a global layer."""
    return tokens * group + (tokens // group * latents) ** 2
