"""G_stack: blocks in the order of whole stacks, equal bit for bit; the paper's timing, held to a share of the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.grow.g_stack import advised, growth_tokens
from gossamer.spec.errors import BadInput
from grow.grow_models import Plain, gpt2, grown


def test_block_i_is_block_i_mod_l_and_all_else_is_copied() -> None:
    source, target, found = grown(gpt2, {}, {"n_layer": 8}, "g_stack")
    small, large = dict(source.named_parameters()), dict(target.named_parameters())
    for name, p in large.items():
        _, _, rest = name.partition(".h.")
        if rest:
            number, _, inner = rest.partition(".")
            name = f"transformer.h.{int(number) % 2}.{inner}"
        assert torch.equal(p, small[name]), name
    order = [large[f"transformer.h.{i}.ln_1.bias"][0].item() for i in range(8)]
    assert order == order[:2] * 4 and order[0] != order[1], "stacks of the whole, not each block repeated"
    assert not found.moments
    assert set(found.eps.values()) == {1e-5}, "that of the source"


def test_copies_are_not_tied() -> None:
    _, target, _ = grown(Plain, {}, {"layers": 4}, "g_stack")
    with torch.no_grad():
        target.blocks[0].up.weight.zero_()
    assert float(target.blocks[2].up.weight.detach().abs().max()) > 0


def test_moments_start_anew() -> None:
    moments = {"mean/embed.weight": torch.ones(50, 24)}
    _, _, found = grown(Plain, {}, {"layers": 4}, "g_stack", moments=moments, degrees={"mean": 1})
    assert not found.moments


@pytest.mark.parametrize(("parameters", "tokens", "expected"), [(8e9, 15e12, 6.58e9), (7e9, 2e12, 11.1e9)])
def test_the_papers_table(parameters: float, tokens: float, expected: float) -> None:
    assert growth_tokens(parameters, tokens) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("parameters", "tokens", "expected"), [(13e9, 2e12, 15.8e9), (70e9, 2e12, 42.5e9)])
def test_the_papers_table_of_larger_models(parameters: float, tokens: float, expected: float) -> None:
    assert growth_tokens(parameters, tokens) == pytest.approx(expected, rel=0.01)


def test_below_a_billion_the_equation_asks_for_more_than_there_is_and_is_held() -> None:
    found = advised(124e6, 2.5e9)
    assert found["paper_source_tokens"] > found["target_tokens"] == 2.5e9
    assert found["advised_source_tokens"] == pytest.approx(0.1 * 2.5e9)
    assert advised(8e9, 15e12)["advised_source_tokens"] == pytest.approx(0.03 * 15e12)
    assert advised(1e6, 0.0) == {}


@pytest.mark.parametrize(
    ("make", "large", "said"),
    [
        (Plain, {"layers": 5}, "set it to 4 or 6"),
        (Plain, {"layers": 4, "width": 48}, "the same residual stream in both models"),
        (Plain, {"layers": 4, "hidden": 72}, "the same hidden units in both models"),
        (Plain, {"layers": 1}, "larger than its source"),
    ],
)
def test_what_cannot_be_stacked_is_refused_by_name(make: Any, large: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        grown(make, {}, large, "g_stack")
