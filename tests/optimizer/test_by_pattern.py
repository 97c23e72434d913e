"""Learning rates by parameter, against torch's parameter groups."""

from __future__ import annotations

import pytest
import torch

from gossamer import optimizer as optimizer_methods
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import BadInput

FACTORS = [["^head", 10.0], ["bias", 0.5], ["head.bias", 3.0]]


def test_it_is_torch_with_a_group_for_every_factor() -> None:
    written = {"by_pattern": {"inner": {"adamw": {"lr": 1e-2, "betas": [0.9, 0.95]}}, "lr_factors": FACTORS}}
    rule = optimizer_methods.build(written)
    names = {"body.weight": 1.0, "body.bias": 0.5, "head.weight": 10.0, "head.bias": 10.0}
    torch.manual_seed(0)
    ours = {name: torch.randn(6, 4) for name in names}
    theirs = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in ours.items()}
    groups = [{"params": [theirs[name]], "lr": 1e-2 * factor} for name, factor in names.items()]
    decay = AdamW().weight_decay
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)
    state = rule.init(ours)
    for step in range(5):
        grads = {name: torch.randn(6, 4) for name in names}
        rule.update(ours, grads, state, lr_scale=1.0, step=step)
        for name, parameter in theirs.items():
            parameter.grad = grads[name]
        reference.step()
    for name in names:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7), name


def test_a_pattern_that_finds_nothing_is_named() -> None:
    rule = optimizer_methods.build({"by_pattern": {"lr_factors": [["lora_b", 16]]}})
    with pytest.raises(BadInput, match=r"no trained parameter has 'lora_b' in its name.*lora_B"):
        rule.check(["q_proj.lora_A.weight", "q_proj.lora_B.weight"])


@pytest.mark.parametrize(("factors", "said"), [([["(", 1.0]], "regular expression"), ([["a", 0]], "above 0, got 0")])
def test_bad_factors_are_named(factors: list[list[object]], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        optimizer_methods.build({"by_pattern": {"lr_factors": factors}})
