"""Memory estimate of the unsharded model's activations, made before one process builds it."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.trace import trace
from gossamer.proof.trials import Trial


def activation_bytes(ways: InputVariants, one: Trial) -> int:
    """Return the bytes of activations that the largest micro-batch of `one` saves for its backward pass, without
    parameters.

    The forward is traced on fake tensors (shapes alone) if the model allows it, else on real ones.
    """
    rows = max((p.rows for mine in one.pieces.values() for p in mine.values()), key=_numel)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    def run() -> object:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return ways.run(ways.module, rows)

    trace(ways.module, run, units=ways.units)
    weights = {p.untyped_storage()._cdata for p in ways.module.parameters()}
    return sum(size for key, size in kept.items() if key not in weights)


def _numel(rows: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in rows.values())
