"""Models of transformers, none of which this package knows by name: cut, and compared gradient by gradient."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import run_lockstep, stages_of
from gossamer.model.split.split_points import balanced_split, shared_names, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.unit_seeds import UnitSeeds, unit_seeds
from gossamer.model.units import unit_names

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
MOE = TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 4}
BERT = {k: v for k, v in TEXT.items() if k not in ("num_key_value_heads", "head_dim")}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.2,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
WHISPER = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "dropout": 0.2,
}  # fmt: skip
VIT = BERT | {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.2}
DROPOUT = {"attention_dropout": 0.2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", TEXT | DROPOUT),
    "gpt2": ("CausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}),
    "qwen3": ("CausalLM", TEXT | {"tie_word_embeddings": True}),
    "gemma": ("CausalLM", TEXT),
    "mistral": ("CausalLM", TEXT | DROPOUT),
    "mixtral": ("CausalLM", MOE),
    "gpt_oss": ("CausalLM", MOE),
    "mamba": ("CausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}),
    "jamba": ("CausalLM", MOE | MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "bert": ("MaskedLM", BERT),
    "t5": ("Seq2SeqLM", T5),
    "vit": ("ImageClassification", VIT),
    "whisper": ("SpeechSeq2Seq", WHISPER),
}
# The model drops out of what the last encoder unit gives; where decoder units of two stages read that, each stage does
# it again, and the two gradients are scaled before they are added, not after.
READ_TWICE_THROUGH_GLUE = {"t5"}
Batch = Mapping[str, Any]


def build(kind: str) -> nn.Module:
    transformers = importlib.import_module("transformers")
    head, keys = CASES[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **keys)
    module = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    assert isinstance(module, nn.Module)
    return module.train()


def batches(kind: str) -> list[dict[str, Tensor]]:
    return [_batch(kind, torch.Generator().manual_seed(seed)) for seed in range(2)]


def _batch(kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (3, 10), generator=generator)
    if kind == "vit":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1, 1])}
    if kind == "whisper":
        return {"input_features": torch.randn(3, 8, 32, generator=generator), "labels": ids}
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0  # padded
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(seeds: Mapping[int, UnitSeeds], module: nn.Module, batch: Batch) -> Tensor:
    with seeds[id(module)].at(0, int(batch["labels"].sum())):
        loss: Tensor = module(**batch).loss
    return loss


NIGHTLY = ("qwen3", "mistral", "gemma", "jamba", "whisper")  # llama, mamba and t5 are their near relatives


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.nightly] if one in NIGHTLY else []) for one in CASES]
)
def test_every_gradient_equals_the_uncut_model_s(kind: str) -> None:
    """With dropout, padding and router losses on; bit for bit, but for parameters that several stages add up."""
    module, given = build(kind), batches(kind)
    units = unit_names(module)
    flow = trace(module, lambda: module(**given[0]).loss, units=units)
    whole = copy.deepcopy(module)
    seeds = {id(whole): unit_seeds(whole, seed=1)}
    losses = [loss_of(seeds, whole, batch) for batch in given]
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    theirs = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for stages in (2, 3):
        cuts = balanced_split(flow, stages)
        summed = shared_names(stage_specs(module, flow, cuts), module)
        parts = stages_of(module, flow, cuts)
        seeds = {id(part.module): unit_seeds(part.module, seed=1) for part in parts}
        ours = run_lockstep(parts, lambda m, b, by=seeds: loss_of(by, m, b), given)
        assert all(torch.equal(a, b) for a, b in zip(ours.losses, losses, strict=True))
        assert ours.gradients.keys() == theirs.keys()
        different = {n for n, g in theirs.items() if not torch.equal(ours.gradients[n], g)}
        assert kind in READ_TWICE_THROUGH_GLUE or different <= summed.keys()
        for name in different:
            torch.testing.assert_close(ours.gradients[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_router_logits_of_blocks_elsewhere_reach_the_loss() -> None:
    module, given = build("mixtral"), batches("mixtral")
    flow = trace(module, lambda: module(**given[0]).loss, units=unit_names(module))
    parts = stage_specs(module, flow, balanced_split(flow, 3))
    inner = [[v for v in p.receives if v.place >= len(flow.calls[v.call].leaves)] for p in parts]
    before = [sum(".layers." in call.unit for call in flow.calls[: p.low]) for p in parts]
    assert [len(values) for values in inner] == before and before[1] > 0
    assert [len(p.receives) - len(values) for p, values in zip(parts, inner, strict=True)] == [0, 1, 1]
