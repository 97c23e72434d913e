from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer.model import model_profile
from gossamer.model.forward_adapter import caller_of
from gossamer.model.model_profile import (
    facts_of,
    forward_flop_per_token,
    measure_peak_flop_per_s,
    training_flop_per_token,
)
from gossamer.model.source.hf import Hf
from model.tiny import CONFIGS, SIZES, Plain, batch


def test_facts_count_tied_parameters_once() -> None:
    facts = facts_of(Plain(width=16, layers=3))
    assert facts.parameters == facts.trainable == 257 * 16 + 3 * (16 * 16 + 16)
    assert facts.parameter_bytes == 4 * facts.parameters and facts.dtype is torch.float32
    assert facts.tied == (("embed.weight", "head.weight"),)


def test_flop_of_a_linear_chain() -> None:
    module = Plain(width=16, layers=3)
    counted = forward_flop_per_token(module, caller_of(module), batch(1, 16))
    assert counted == 2 * (3 * 16 * 16 + 16 * 257)
    assert training_flop_per_token(counted) == 3 * counted and module.training and module.blocks[0].drop.training


def test_flop_of_a_transformer_counts_attention() -> None:
    module = Hf("llama", SIZES).fitted_to_tokenizer(257, 256).build(0)
    width, ffn, heads, kv, head = 32, 64, 4, 2, 8
    linear = 2 * (width * head * (heads + 2 * kv) + heads * head * width + 3 * width * ffn) + width * 257
    for sequence in (16, 48):
        attention = 2 * 2 * heads * head * sequence
        counted = forward_flop_per_token(module, caller_of(module), batch(1, sequence))
        assert counted == pytest.approx(2 * linear + 2 * attention, rel=0.01)  # the rest: rotary frequencies


def test_uncountable_models_fall_back_to_their_parameters() -> None:
    module = nn.Embedding(257, 8)
    assert forward_flop_per_token(module, caller_of(module), batch(1, 16)) == 2 * 257 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_a_rate_some_machine_could_have(dtype: torch.dtype) -> None:
    assert 1e8 < measure_peak_flop_per_s(dtype) < 1e16


def test_no_kind_of_model_resists_counting() -> None:
    for kind, config in CONFIGS.items():
        module = Hf(kind, config).fitted_to_tokenizer(257, 256).build(0)
        facts = facts_of(module)
        assert forward_flop_per_token(module, caller_of(module), batch(1, 16)) > facts.parameters / 2
        assert len([u for u in facts.units if u.rpartition(".")[2].isdigit()]) == 2


def test_the_peak_is_that_of_the_faster_type(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 1.0, torch.float32: 5.0, torch.float64: 9.0}
    monkeypatch.setattr(model_profile, "_best_rate", lambda dtype, device, threads: rates[dtype])
    assert [measure_peak_flop_per_s(dtype) for dtype in rates] == [5.0, 5.0, 9.0]
    assert {rows * inner * columns for rows, inner, columns in model_profile._shapes(256)} == {256**3}


def test_on_a_busy_machine_the_peak_is_that_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads wait for each other through a matmul while other programs have the cores."""
    monkeypatch.setattr(
        model_profile, "_matmul", lambda *_: lambda: 0.03 if torch.get_num_threads() > 1 else 2.0 * 128**3 / 5e10
    )
    monkeypatch.setattr(model_profile, "_LARGEST", 128)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert model_profile._best_rate.__wrapped__(torch.float32, torch.device("cpu"), 2) == pytest.approx(5e10)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
