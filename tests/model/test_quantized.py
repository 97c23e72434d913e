"""Frozen weights in blocks: errors, gradients, memory, and what a module with them can be put through."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import linear_names, nbytes_of, quantize_base
from gossamer.model.quantized import Blocks, build, names
from gossamer.model.quantized_linear import QuantizedLinear
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, SIZES, Plain, batch

gguf = pytest.importorskip("gguf")
KINDS: dict[str, Any] = {
    "int8": "int8",
    "int4": "int4",
    "bf16": "bf16",
    "gguf": {"gguf": {"type": "Q4_1"}},
    "packed": "packed",
}
ERRORS = {"int8": 0.007, "int4": 0.1, "bf16": 0.002, "gguf": 0.1, "packed": 0.1}  # relative, of normal weights
BITS = {"int8": 8.25, "int4": 4.5, "bf16": 16, "gguf": 5, "packed": 4.5}


def llama(**more: Any) -> nn.Module:
    config = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 257, **more}
    return origin_of(ModelSection(hf="llama", config=config)).build(0)


def loss_and_gradients(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    loss = module(**batch()).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def decoded(module: nn.Module) -> nn.Module:
    """The same model with ordinary linear layers of what the blocks decode to."""
    plain = llama()
    state = {name: tensor for name, tensor in module.state_dict().items() if ".weight_" not in name}
    layers = {name: one for name, one in module.named_modules() if isinstance(one, QuantizedLinear)}
    plain.load_state_dict({**state, **{f"{name}.weight": one.weight for name, one in layers.items()}})
    for name in layers:
        plain.get_submodule(name).weight.requires_grad_(False)
    return plain


def test_every_format_is_tried_here() -> None:
    assert set(KINDS) == set(names())


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_normal_weights_and_the_bits_of_one(kind: str) -> None:
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    format = build(KINDS[kind])
    blocks = format.encode(weight)
    made = format.decoded(blocks, 256, torch.float32)
    assert (made - weight).norm() / weight.norm() < ERRORS[kind]
    assert blocks.nbytes * 8 == BITS[kind] * weight.numel()
    empty = format.empty(96, 256)
    assert (empty.codes.shape, empty.codes.dtype) == (blocks.codes.shape, blocks.codes.dtype)
    assert empty.nbytes == blocks.nbytes


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("columns", [1, 63, 65, 200])
def test_any_width_and_blocks_of_one_value(kind: str, columns: int) -> None:
    weight = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
    weight[1] = 0.0
    weight[2] = 0.75
    format = build(kind)
    made = format.decoded(format.encode(weight), columns, torch.float32)
    assert made.shape == weight.shape and (made[1] == 0).all()
    assert (made[2] - 0.75).abs().max() < 1e-3
    assert (made[0] - weight[0]).abs().max() <= weight[0].abs().max() * (0.07 if kind == "int4" else 0.005)


@pytest.mark.parametrize("kind", [k.name for k in gguf.GGMLQuantizationType if k in gguf.quants._type_traits])
def test_gguf_blocks_decode_bit_for_bit_as_the_package_does(kind: str) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(0).integers(0, 256, (5, 3 * size), dtype=np.uint8)  # with infinities and NaN
    with np.errstate(all="ignore"):
        there = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
        ours = build({"gguf": {"type": kind}}).decode(Blocks(torch.from_numpy(raw), None), 3 * elements).numpy()
    assert np.array_equal(ours, there, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_decoded_weights(kind: str) -> None:
    module = llama()
    report = quantize_base(module, KINDS[kind])
    plain = decoded(module)
    (ours, mine), (theirs, others) = loss_and_gradients(module), loss_and_gradients(plain)
    assert torch.allclose(ours, theirs, rtol=1e-6) and mine.keys() == others.keys()
    for name, gradient in mine.items():
        assert (gradient - others[name]).norm() <= 1e-5 * others[name].norm(), name
    assert len(report.tensors) == 14 and max(one.relative_error for one in report.tensors) < ERRORS[kind]
    assert "model.embed_tokens.weight" in dict(report.kept) and "lm_head.weight" in dict(report.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_blocks_and_nothing_of_a_weight_is_saved(kind: str) -> None:
    layer = QuantizedLinear.of(nn.Linear(256, 512), build(KINDS[kind]))
    assert nbytes_of(layer) == BITS[kind] / 8 * 256 * 512 + 512 * 4
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    x = torch.randn(4, 256, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert not saved
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, layer.weight.sum(0).expand(4, -1), rtol=1e-4, atol=1e-4)


def test_a_report_counts_what_the_module_holds() -> None:
    module = llama()
    before = nbytes_of(module)
    report = quantize_base(module, "int4")
    assert (report.bytes_before, report.bytes_after) == (before, nbytes_of(module))
    saved = sum(one.bytes_before - one.bytes_after for one in report.tensors)
    assert before - report.bytes_after == saved > 0
    assert "14 linear layers" in str(report)


def test_autocast_and_a_module_in_bf16_compute_in_bf16() -> None:
    layer = QuantizedLinear.of(nn.Linear(64, 32), build("int8"))
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad is not None and x.grad.dtype is torch.float32
    scales, codes = layer.weight_scales, layer.weight_blocks
    layer.bfloat16()
    assert scales is not None and layer.weight_scales is not None
    assert torch.equal(layer.weight_scales, scales) and torch.equal(layer.weight_blocks, codes)
    assert layer.weight.dtype is torch.bfloat16 and layer(x.bfloat16()).dtype is torch.bfloat16


def test_a_gradient_of_a_gradient() -> None:
    layer = QuantizedLinear.of(nn.Linear(8, 4).double(), build("bf16"))
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,)) and torch.autograd.gradgradcheck(layer, (x,))


def test_a_trained_bias_has_a_gradient() -> None:
    layer = QuantizedLinear.of(nn.Linear(8, 4), build("int8"))
    assert layer.bias is not None
    layer.bias.requires_grad_(True)
    layer(torch.randn(5, 8)).sum().backward()
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [5.0] * 4


def test_a_copy_and_a_state_made_on_meta_are_the_same_layer() -> None:
    layer = QuantizedLinear.of(nn.Linear(70, 9), build("int4"))
    with torch.device("meta"):
        other = QuantizedLinear(70, 9, build("int4"), bias=True)
    assert other.weight_blocks.is_meta
    other.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 70)
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert set(layer.state_dict()) == {"bias", "weight_blocks", "weight_scales"}
    again = QuantizedLinear(70, 9, build("int4"))
    again.fill(layer.weight)
    assert (again.weight - layer.weight).abs().max() < 1e-3
    with pytest.raises(BadInput, match=r"shape \(9, 70\)"):
        again.fill(torch.zeros(70, 9))


def test_a_layer_without_memory_can_be_traced() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for kind in (*KINDS.values(), {"gguf": {"type": "Q5_1"}}):
        with FakeTensorMode():
            layer = QuantizedLinear(64, 32, build(kind))
            assert layer(torch.empty(2, 64)).shape == (2, 32)


def test_conv1d_of_transformers_is_turned() -> None:
    module = origin_of(ModelSection(hf="gpt2", config={**CONFIGS["gpt2"], "vocab_size": 257})).build(0).eval()
    with torch.no_grad():
        before = module(**batch()).logits
        quantize_base(module, "int8")
        after = module(**batch()).logits
    layer = module.get_submodule("transformer.h.0.attn.c_attn")
    assert isinstance(layer, QuantizedLinear) and layer.weight_as_given().shape == (32, 96)
    assert 0 < (before - after).abs().max() < 0.02 * before.abs().max()


def test_tied_heads_and_strangers_stay_and_naming_them_is_refused() -> None:
    plain = Plain()
    assert linear_names(plain) == ("blocks.0.mix", "blocks.1.mix", "blocks.2.mix")
    with pytest.raises(BadInput, match=r"head, whose weight is also embed\.weight"):
        quantize_base(plain, "int8", ["head"])
    with pytest.raises(BadInput, match=r"no linear layer 'blocks\.0\.mux'"):
        quantize_base(plain, "int8", ["blocks.0.mux"])
    report = quantize_base(plain, "int8", ["blocks.1.mix"])
    assert ("head.weight", "tied to embed.weight") in report.kept and (
        "blocks.0.mix.weight",
        "not chosen",
    ) in report.kept


def test_what_a_format_cannot_hold_is_refused_by_name() -> None:
    wide = nn.Sequential(nn.Linear(64, 4))
    wide[0].weight.data[0, 0] = 1e9
    with pytest.raises(BadInput, match=r"^0: wanted a weight whose blocks have a scale"):
        quantize_base(wide, "int8")
    with pytest.raises(BadInput, match="rows of a multiple of 32 elements for Q4_1, got 40"):
        quantize_base(nn.Sequential(nn.Linear(40, 4)), KINDS["gguf"])
    with pytest.raises(BadInput, match="Q4_K, which it can only decode"):
        quantize_base(nn.Sequential(nn.Linear(256, 4)), {"gguf": {"type": "Q4_K"}})
    with pytest.raises(BadInput, match="Q4_1"):
        quantize_base(nn.Sequential(nn.Linear(32, 4)), {"gguf": {"type": "q4_1"}})
