"""Precision: the dtype of the computation, and the dtype of what is kept.

            parameters   matmuls, attention    norms, softmax, loss   activations kept      gradients, sums over
            (master)                                                  for backward          ranks, optimizer
    fp32    fp32         fp32                  fp32                   fp32                  fp32
    bf16    fp32         bf16 (torch.autocast) fp32                   mostly bf16           fp32
    fp16    fp32         fp16 (torch.autocast) fp32                   mostly fp16           fp32, scaled in backward

Autocast casts a parameter to the compute dtype at its first use in a forward and keeps the copy until the forward ends.
Its backward returns the gradient in the parameter's own dtype. So gradients are fp32 from the moment they are
accumulated, reduced in fp32, and applied to fp32 master weights. model.dtype: bfloat16 gives up the master weights (and
half the memory): then parameters, gradients and reductions are bf16, whatever the precision says.

fp16 has too few exponents for small gradients: the loss is multiplied by `Scale.factor` before backward and the
gradients divided by it before they are exchanged. A gradient that is not finite rejects the step and halves the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input

_GROWTH = 2.0
_GROWTH_STEPS = 2000
_FIRST_FACTOR = 2.0**16
_LARGEST_FACTOR = 2.0**24  # beyond, the factor itself would soon not fit into fp16 sums


@dataclass(frozen=True, slots=True)
class Scale:
    """The state of the loss scaling. Replaced at every step, saved with every checkpoint."""

    factor: float = 1.0
    good_steps: int = 0  # committed steps since the factor last changed

    def after(self, *, finite: bool) -> Scale:
        """Return the state after a step whose gradients were `finite` over all ranks, or not (a rejected step)."""
        if not finite:
            return Scale(max(1.0, self.factor / _GROWTH), 0)
        if self.good_steps + 1 < _GROWTH_STEPS:
            return Scale(self.factor, self.good_steps + 1)
        return Scale(min(_LARGEST_FACTOR, self.factor * _GROWTH), 0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: two 0-dim tensors."""
        return {
            "factor": torch.tensor(self.factor, dtype=torch.float64),
            "good_steps": torch.tensor(self.good_steps, dtype=torch.int64),
        }

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Scale:
        """Return the state that `tensors` hold."""
        return Scale(float(tensors["factor"]), int(tensors["good_steps"]))


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision of the computation and its loss scaling: one of `FP32`, `BF16`, `FP16`."""

    name: Literal["fp32", "bf16", "fp16"]
    compute: torch.dtype

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the autocast context for the forward and the loss. The backward runs outside of it."""
        if self.compute is torch.float32:
            return nullcontext()
        return torch.autocast(device.type, self.compute)

    def first_scale(self) -> Scale:
        """Return the loss scale a run begins with; 1, and constant, if the precision needs none."""
        return Scale(_FIRST_FACTOR if self.compute is torch.float16 else 1.0)

    def next_scale(self, scale: Scale, *, finite: bool) -> Scale:
        """Return the loss scale after a step."""
        return scale.after(finite=finite) if self.compute is torch.float16 else scale

    def check(self, parameters: torch.dtype) -> None:
        """Raise BadInput if parameters of this dtype cannot be trained in this precision."""
        if parameters is torch.float16:
            wanted = "a dtype of the parameters in which small updates are not rounded to zero"
            do = "set model.dtype: float32, and train.precision: fp16 to compute in fp16"
        elif parameters is torch.bfloat16 and self.compute is torch.float16:
            wanted, do = (
                "float32 parameters",
                "set model.dtype: float32; train.precision: fp16 computes in fp16 all the same",
            )
        else:
            return
        got = f"model.dtype: {str(parameters).removeprefix('torch.')} with train.precision: {self.name}"
        raise bad_input(wanted=wanted, got=got, do=do, key="model.dtype")

    def caution(self, device: torch.device) -> str:
        """Return a warning about this precision on this device; "" if there is none."""
        if device.type == "cpu" and self.compute is torch.float16 and not _has_fp16():
            return "this CPU has no fp16 arithmetic: large matmuls run about 100 times slower than in fp32; use bf16"
        if device.type == "cpu" and self.compute is torch.bfloat16 and not _has_bf16():
            return "this CPU has no bf16 arithmetic: bf16 saves memory here, not time"
        return ""


FP32 = Precision("fp32", torch.float32)
BF16 = Precision("bf16", torch.bfloat16)
FP16 = Precision("fp16", torch.float16)


def precision_of(name: str) -> Precision:
    """Return the precision named by train.precision (`auto`: fp32, until it is measured); raise BadInput."""
    for one in (FP32, BF16, FP16):
        if one.name == name or (name == "auto" and one is FP32):
            return one
    raise BadInput(f"wanted auto, fp32, bf16 or fp16, got {name!r}: choose one of these", key="train.precision")


def _has_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
