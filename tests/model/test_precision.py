from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer.model.precision import BF16, FP16, FP32, Scale, precision_of
from gossamer.spec.errors import BadInput
from model.tiny import Plain, batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_what_is_computed_in_what_and_kept_in_what(name: str) -> None:
    precision, module = precision_of(name), Plain(dropout=0.0)
    seen: list[torch.dtype] = []
    module.blocks[0].mix.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    with precision.autocast(CPU):
        logits = module(batch()["input_ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten())
    loss.backward()
    assert seen == [precision.compute] and loss.dtype is torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


def test_the_scale_halves_at_once_and_doubles_slowly() -> None:
    scale = FP16.first_scale()
    down = FP16.next_scale(scale, finite=False)
    assert down == Scale(scale.factor / 2, 0)
    for _ in range(1999):
        down = FP16.next_scale(down, finite=True)
    assert down == Scale(scale.factor / 2, 1999)
    assert FP16.next_scale(down, finite=True) == scale
    assert Scale(1.0).after(finite=False) == Scale(1.0)
    for precision in (FP32, BF16):
        assert precision.next_scale(precision.first_scale(), finite=False) == Scale(1.0, 0)


def test_the_scale_travels_as_tensors() -> None:
    state = Scale(1024.0, 17).tensors()
    assert all(t.ndim == 0 for t in state.values()) and Scale.of(state) == Scale(1024.0, 17)


def test_small_gradients_survive_scaled_fp16_and_not_bare() -> None:
    """The gradient before the layer is 3e-8, half of fp16's smallest number."""

    def gradient(factor: float) -> float:
        layer = nn.Linear(4, 4, bias=False)
        with FP16.autocast(CPU):
            loss = (layer(torch.ones(1, 4)).float() * 2.5e-8).sum()
        (loss * factor).backward()
        assert layer.weight.grad is not None
        return float(layer.weight.grad.max()) / factor

    assert gradient(1.0) == 0
    assert gradient(FP16.first_scale().factor) == pytest.approx(2.5e-8, rel=1e-2)


def test_parameters_that_cannot_be_trained() -> None:
    for precision in (FP32, BF16, FP16):
        precision.check(torch.float32)
        with pytest.raises(BadInput, match="float16"):
            precision.check(torch.float16)
    BF16.check(torch.bfloat16)
    FP32.check(torch.bfloat16)
    with pytest.raises(BadInput, match="bfloat16"):
        FP16.check(torch.bfloat16)
    with pytest.raises(BadInput, match="fp8"):
        precision_of("fp8")


def test_cautions_concern_the_device_only() -> None:
    assert FP32.caution(CPU) == "" and FP16.caution(torch.device("cuda")) == ""
    supported = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert bool(FP16.caution(CPU)) is not supported
