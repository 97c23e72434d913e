"""Islands that bring their second moments together lose next to nothing by parting; with each its own they do.

Words after words, few often and most seldom, as text has them: what is seldom seen is what islands with second moments
of their own learn more slowly. Two tables and a softmax; the data of all islands together are those of one batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gossamer.optimizer import Optimizer
from gossamer.optimizer.adamw import AdamW
from gossamer.optimizer.common_adamw import CommonAdamW

WORDS, WIDTH, ROWS, STEPS, EVERY, TOLD = 400, 16, 64, 400, 8, (1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48)
RULE = AdamW(lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
Tensors = dict[str, Tensor]


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Words by Zipf's law, and what follows each of them."""
    often = 1 / torch.arange(1, WORDS + 1).float()
    taste = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7))
    follows = torch.softmax(2.0 * taste + (often / often.sum()).log(), 1)
    generator = torch.Generator().manual_seed(seed)
    words = torch.multinomial(often, count, replacement=True, generator=generator)
    return words, torch.multinomial(follows[words], 1, generator=generator)[:, 0]


def loss_of(params: Tensors, words: Tensor, after: Tensor) -> Tensor:
    return cross_entropy(params["embedding"][words] @ params["head"].T, after)


def gradients(params: Tensors, words: Tensor, after: Tensor) -> Tensors:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = torch.autograd.grad(loss_of(leaves, words, after), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def trained(rule: Optimizer, islands: int, *, batch: int) -> float:
    """The loss of the islands' mean, after rounds of `EVERY` steps at a rate that falls to 0."""
    seed = torch.Generator().manual_seed(3)
    first = {name: 0.1 * torch.randn(WORDS, WIDTH, generator=seed) for name in ("embedding", "head")}
    worlds = [{name: p.clone() for name, p in first.items()} for _ in range(islands)]
    states = [rule.init(params) for params in worlds]
    for step in range(STEPS):
        words, after = draw(batch, 1000 + step)
        shares = zip(worlds, states, words.chunk(islands), after.chunk(islands), strict=True)
        for params, state, mine, next_ in shares:
            rule.update_apart(params, gradients(params, mine, next_), state, lr_scale=1 - step / STEPS, step=step)
        if (step + 1) % EVERY == 0:
            for name in first:
                mean = torch.stack([params[name] for params in worlds]).mean(0)
                for params in worlds:
                    params[name].copy_(mean)
            if (step + 1) // EVERY in TOLD:
                known = [rule.second_moments(state, step=step + 1) for state in states]
                for state in states:
                    rule.learn({n: torch.stack([one[n] for one in known]).mean(0) for n in known[0]}, state)
    return float(loss_of(worlds[0], *draw(20000, 99)))


@pytest.mark.parametrize("islands", [2, 4])
def test_what_parting_costs_is_what_each_divides_by(islands: int) -> None:
    """Of the loss of one batch of all: 0.999 and 1.000 with common second moments, 1.017 and 1.036 with own ones."""
    dense = trained(RULE, 1, batch=islands * ROWS)
    common = trained(CommonAdamW(inner=RULE, part=1 / islands), islands, batch=islands * ROWS)
    own = trained(RULE, islands, batch=islands * ROWS)
    assert common < 1.005 * dense
    assert own > 1.01 * dense
