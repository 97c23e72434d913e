"""Quantizing whole models: which layers, in which order their inputs are seen, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import linear_names
from gossamer.model.quantized_linear import QuantizedLinear, quantized_layers
from gossamer.prune import apply_masks, prune
from gossamer.prune import build as pruning
from gossamer.quantize import build
from gossamer.quantize.model.layers import Calibration, quantize_layers
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, Plain, batch


def model(kind: str) -> nn.Module:
    if kind == "plain":
        return Plain(width=32, layers=2, dropout=0.3)
    return origin_of(ModelSection(hf=kind, config={**CONFIGS[kind], "vocab_size": 257})).build(0)


def calibration(module: nn.Module, count: int = 2) -> Calibration:
    batches = [batch(rows=4, sequence=16, seed=seed) for seed in range(count)]
    if isinstance(module, Plain):
        batches = [{"input_ids": one["input_ids"]} for one in batches]
    return Calibration(caller=caller_of(module, batches[0]), batches=batches)


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        one = calibration(module)
        found: Any = one.caller(module.eval(), one.batches[0])
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("kind", ["plain", "llama", "gpt2"])
@pytest.mark.parametrize("by", ["round_to_nearest", "gptq"])
def test_linear_layers_become_integers_and_the_others_stay(kind: str, by: str) -> None:
    module = model(kind)
    names, before = linear_names(module), logits(module)
    module.train()
    report = quantize_layers(module, build({by: {"bits": 8, "group": 32}}), calibration(module))
    assert tuple(quantized_layers(module)) == names == tuple(one.name for one in report.layers)
    assert module.training
    assert (logits(module) - before).abs().max() < 0.02 * before.abs().max()
    assert all(one.output_error is not None and one.output_error < 0.02 for one in report.layers)
    assert report.bits_per_weight == 9
    assert any("embed" in name or "wte" in name for name in report.kept)


@pytest.mark.parametrize(
    ("by", "symmetric", "keeps"),
    [("gptq", False, False), ("round_to_nearest", False, False), ("round_to_nearest", True, True)],
)
def test_zeros_of_a_pruned_model_that_fill_are_said(by: str, symmetric: bool, keeps: bool) -> None:
    module = model("plain")
    masks = prune(module, pruning("magnitude")).masks
    apply_masks(module, masks)
    quantizer = build({by: {"bits": 4, "group": 32, "symmetric": symmetric}})
    report = quantize_layers(module, quantizer, calibration(module))
    for one in report.layers:
        zeros = quantized_layers(module)[one.name].weight[~masks[f"{one.name}.weight"]] == 0
        assert one.zeros_filled == int((~zeros).sum()) and (one.zeros_filled == 0) == keeps


def test_a_layer_that_is_called_by_name_is_calibrated() -> None:
    class ByName(nn.Module):
        def __init__(self, by_name: bool) -> None:
            super().__init__()
            self.mix, self.by_name = nn.Linear(32, 8), by_name

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.mix(input=x) if self.by_name else self.mix(x)
            return found

    modules = [ByName(by_name=by_name) for by_name in (True, False)]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for module in modules:
        quantize_layers(module, build("gptq"), Calibration(caller=caller_of(module, ["x"]), batches=[{"x": x}]))
    assert torch.equal(modules[0](x), modules[1](x))


def test_a_few_moments_at_a_time_are_what_all_of_a_block_give() -> None:
    """Where one layer's inputs do not follow from another's in its group, the order of gathering changes nothing."""
    first, second = model("plain"), model("plain")
    second.load_state_dict(first.state_dict())
    for module, limit in ((first, 1 << 30), (second, 1)):
        quantize_layers(module, build("gptq"), calibration(module), moments_bytes=limit)
    assert torch.equal(logits(first), logits(second))


def test_later_blocks_see_what_quantized_ones_before_them_compute() -> None:
    module, exact = model("plain"), model("plain")
    exact.load_state_dict(module.state_dict())
    one = calibration(module)
    quantizer = build({"gptq": {"bits": 2, "group": 0}})
    quantize_layers(module, quantizer, one)
    again, inputs = copy.deepcopy(module), list[Tensor]()
    exact.eval()
    with torch.no_grad():
        again.eval().blocks[1].register_forward_pre_hook(lambda layer, args: inputs.append(args[0].flatten(0, 1)))  # type: ignore[index]
        for some in one.batches:
            one.caller(again, some)
    seen = torch.zeros(32, 32).double()
    for x in inputs:
        seen += (x.t() @ x).double()
    alone = quantizer.encode(exact.blocks[1].mix.weight, seen).blocks  # type: ignore[index]
    layer = module.blocks[1].mix  # type: ignore[index]
    assert isinstance(layer, QuantizedLinear) and torch.equal(layer.weight_blocks, alone.codes)


def test_a_layer_that_no_text_reaches_is_rounded_and_said() -> None:
    module = model("plain")
    module.add_module("spare", nn.Linear(32, 32))
    report = quantize_layers(module, build("gptq"), calibration(module))
    (spare,) = (one for one in report.layers if one.name == "spare")
    assert "no calibration input" in spare.said and spare.output_error is None


class Doubled(nn.Linear):
    """A linear layer with a forward of its own, as Falcon has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_what_is_refused_names_the_layer() -> None:
    module = model("plain")
    with pytest.raises(BadInput, match="wanted calibration text"):
        quantize_layers(module, build("gptq"))
    module.blocks[1].mix.weight.data[0, 0] = torch.nan  # type: ignore[index]
    with pytest.raises(BadInput, match=r"finite numbers in blocks\.1\.mix\.weight"):
        quantize_layers(module, build("round_to_nearest"))
    assert module.training, "as it was"
    with pytest.raises(BadInput, match="linear layers"):
        quantize_layers(nn.Sequential(nn.Embedding(4, 4)), build("round_to_nearest"))
    with pytest.raises(BadInput, match="got none in a Sequential, whose Doubled may compute otherwise"):
        quantize_layers(nn.Sequential(Doubled(4, 4)), build("round_to_nearest"))
