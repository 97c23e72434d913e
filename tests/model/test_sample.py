from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.generate import TokenChoice, generate, stream
from gossamer.model.source.hf import Hf
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, Plain


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("latin-1")


class Counts(nn.Module):
    """Continues by the next byte, and remembers the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    def forward(self, x: Tensor) -> tuple[None, Tensor]:
        self.longest = max(self.longest, x.shape[1])
        return None, nn.functional.one_hot((x + 1) % 256, 257).float() * 50


class OnlyLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().mean()


def test_text_goes_on_and_the_window_slides() -> None:
    module = Counts()
    assert generate(module, Bytes(), "ab", tokens=6, window=3) == "cdefgh" and module.longest == 3
    assert generate(module, Bytes(), "ab", tokens=99, stop=ord("e")) == "cd"
    assert generate(module, Bytes(), "", tokens=2, temperature=0, stop=ord("`")) == "ab"


@pytest.mark.parametrize("kind", ["plain", "llama"])
def test_equal_seeds_give_equal_text(kind: str) -> None:
    module = Plain() if kind == "plain" else Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256).build(0)
    state = torch.get_rng_state()
    texts = [generate(module, Bytes(), "x", tokens=12, temperature=20.0, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and module.training
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["plain", "llama"])
def test_the_stream_is_the_text_with_a_window_that_slides(kind: str) -> None:
    module = Plain() if kind == "plain" else Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256).build(0)
    choice = TokenChoice(temperature=3.0, top_k=90)
    text = generate(module, Bytes(), "xy", tokens=30, temperature=3.0, top_k=90, seed=4, window=9)
    assert (
        "".join(stream(module, Bytes(), "xy", tokens=30, choice=choice, seed=4, window=9)) == text and module.training
    )


def test_nucleus_sampling_takes_the_fewest_that_add_up() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for top_p, expected in (
        (0.4, {1}),
        (0.5, {1}),
        (0.6, {1, 3}),
        (0.75, {1, 3}),
        (0.8, {1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        generator, choice = torch.Generator().manual_seed(0), TokenChoice(temperature=1.0, top_p=top_p)
        assert {choice.draw(logits, generator) for _ in range(200)} == expected
    with pytest.raises(BadInput, match="top_p"):
        TokenChoice(top_p=0)


def test_one_candidate_is_the_likeliest() -> None:
    module = Plain()
    greedy = generate(module, Bytes(), "x", tokens=8, temperature=0)
    assert generate(module, Bytes(), "x", tokens=8, temperature=5.0, top_k=1, seed=3) == greedy


def test_what_is_refused() -> None:
    with pytest.raises(BadInput, match="logits"):
        generate(OnlyLoss(), Bytes(), "x", tokens=1)
    with pytest.raises(BadInput, match="temperature"):
        generate(Plain(), Bytes(), "x", tokens=1, temperature=-1)
