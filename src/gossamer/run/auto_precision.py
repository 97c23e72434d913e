"""Choose fp32 or bf16 for `train.precision: auto`, from matmuls measured once on this machine, before step 1."""

from __future__ import annotations

import torch

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.model.model_profile import matmul_seconds
from gossamer.model.precision import BF16, FP32
from gossamer.run.parts import Parts
from gossamer.spec.units import show_seconds

_FASTER = 1.1  # bf16 loses digits: it has to be worth it
_CHOICES = ("", "fp32", "bf16")


def choose_precision(parts: Parts, pump: CommThread, *, kept: str) -> tuple[str, str]:
    """Return the precision, fp32 or bf16, and the reason: the same on all ranks, which must all call this function.

    All ranks measure matmuls of the model's own shapes at the same time; the slowest rank decides.

    `kept`: the precision that an earlier start of the run chose, as far as this rank knows; "": none.
    """
    first = max(int(row[0]) for row in gathered(pump.channel, [_CHOICES.index(kept)]).tolist())
    if first:
        return _CHOICES[first], "as the run began"
    if parts.cut is not None:
        return (
            FP32.name,
            "not measured for a model in stages: set train.precision to bf16 to use bf16",
        )
    if any(p.dtype is torch.bfloat16 for p in parts.outline.parameters()):
        return BF16.name, "parameters are held in it"
    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in parts.outline.parameters() if p.dim() > 1 and p.numel()]
    if not shapes:
        return FP32.name, "the model has no matrices"
    tokens = max(parts.plan.rows) // max(parts.plan.microbatches) * parts.config.data.sequence
    measured = matmul_seconds(shapes, tokens, (FP32, BF16), parts.device)
    fp32_s, bf16_s = gathered(pump.channel, list(measured)).max(0).values.tolist()
    chosen = BF16 if bf16_s * _FASTER < fp32_s else FP32
    said = f"matmuls of this model's shapes take {show_seconds(fp32_s)} in fp32 and {show_seconds(bf16_s)} in bf16"
    return chosen.name, f"{said}, on the slowest rank"
