"""FIT: causal by its gradients, a plain transformer where there is one group, and the work that its formula says."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from gossamer.model.networks.fit import Fit, best_group, fit, score_pairs
from gossamer.model.origin import origin_of
from gossamer.model.units import block_names
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput

SMALL = {"width": 16, "heads": 2, "blocks": 2, "group": 4, "latents": 3}


def test_no_output_depends_on_a_later_input() -> None:
    torch.manual_seed(0)
    module = fit(32, **SMALL).double()
    ids = torch.randint(0, 32, (1, 14))  # the last group is not full
    embedded: list[Tensor] = []

    def kept(_: Any, __: Any, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1]

    module.embed.register_forward_hook(kept)
    logits = module(ids)
    for i in range(14):
        (grad,) = torch.autograd.grad(logits[0, i].sum(), embedded, retain_graph=True)
        by_token = grad.abs().sum(-1)[0]  # the last group is padded to 16
        assert bool((by_token[i + 1 :] == 0).all()), i
        assert bool((by_token[: i + 1] > 0).all()), i  # every token before is seen, near or through latents


def test_one_group_without_global_layers_is_a_plain_transformer() -> None:
    torch.manual_seed(0)
    module = fit(32, **{**SMALL, "group": 64}, global_layers=0).double()
    ids = torch.randint(0, 32, (2, 12))
    assert torch.allclose(module(ids), plain(module, ids), atol=1e-12)


def plain(module: Fit, ids: Tensor) -> Tensor:
    """The same weights in a transformer written down once more: scores, softmax and all."""
    x = module.embed.weight[ids]
    length, heads, half = ids.shape[1], 2, 4
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(half) / half)
    turn = torch.complex(angles.cos().double(), angles.sin().double())

    def split(given: Tensor) -> Tensor:
        return given.view(*given.shape[:2], heads, -1).transpose(1, 2)

    def turned(given: Tensor) -> Tensor:
        found = torch.complex(given[..., :half], given[..., half:]) * turn
        return torch.cat([found.real, found.imag], -1)

    for layer in (one for block in module.blocks for one in block.local):  # type: ignore[union-attr]
        normed = layer.norm(x)
        q, k, v = (split(normed @ one.weight.t()) for one in (layer.q, layer.k, layer.v))
        scores = turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(2 * half)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.out.weight.t()
        x = x + F.gelu(layer.norm_mlp(x) @ layer.up.weight.t()) @ layer.down.weight.t()
    return module.norm(x) @ module.head.weight.t()


def attention_flop(tokens: int, group: int, latents: int, *, globals_: int = 1) -> int:
    """What torch counts for scores and mixing."""
    with torch.device("meta"):
        module = fit(32, width=16, heads=2, blocks=1, group=group, latents=latents, global_layers=globals_)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        module(ids)
    counts = counted.get_flop_counts()["Global"]
    return sum(flop for op, flop in counts.items() if "attention" in str(op) or "bmm" in str(op))


def test_work_follows_its_formula() -> None:
    """4 d flop for each pair of a query and a key; cross-attention has 2 L m pairs more, which is of order L."""
    for tokens, group, latents in ((256, 16, 2), (512, 16, 2), (1024, 32, 4)):
        wanted = 4 * 16 * (score_pairs(tokens, group, latents) + 2 * tokens * latents)
        assert attention_flop(tokens, group, latents) == wanted
        assert attention_flop(tokens, group, latents, globals_=0) == 4 * 16 * tokens * group


def test_the_best_group_and_its_slope() -> None:
    """At n = (2 L m^2)^(1/3) work is least, and grows as L^(4/3)."""
    tokens = 1 << 14
    best = best_group(tokens, 4)
    pairs = {n: tokens * n + (tokens * 4 / n) ** 2 for n in (best / 1.1, best, best * 1.1)}
    assert min(pairs, key=lambda n: pairs[n]) == best
    sizes = [(1 << k, round(best_group(1 << k, 4))) for k in (12, 15, 18)]
    work = [tokens * n + (tokens * 4 / n) ** 2 for tokens, n in sizes]
    slopes = [math.log(b / a) / math.log(8) for a, b in pairwise(work)]
    assert slopes == pytest.approx([4 / 3, 4 / 3], abs=0.02)


def test_memory_grows_more_slowly_than_work() -> None:
    def saved(tokens: int, group: int) -> int:
        module, kept = fit(32, width=16, heads=2, blocks=1, group=group, latents=2), {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
            return tensor

        with saved_tensors_hooks(pack, lambda t: t):
            module(torch.zeros(1, tokens, dtype=torch.long)).sum()
        return sum(size for size, _ in kept.values())

    sizes = [(1 << k, round(best_group(1 << k, 2))) for k in (9, 12)]
    first, last = (saved(*one) for one in sizes)
    assert math.log(last / first) / math.log(8) < 4 / 3


def test_it_is_a_factory_with_blocks() -> None:
    origin = origin_of(ModelSection(factory="gossamer.model.networks.fit:fit", config=SMALL)).fitted_to_tokenizer(
        257, 0
    )
    module = origin.build(0)
    assert module(torch.zeros(2, 9, dtype=torch.long)).shape == (2, 9, 257)
    assert block_names(module) == ("blocks.0", "blocks.1")
    with pytest.raises(BadInput, match="an even size for each head"):
        fit(32, width=12, heads=4)
