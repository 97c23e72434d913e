"""What one process would need, before it is built."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.model.cut.trace import trace
from gossamer.model.cut.ways import Ways
from gossamer.proof.question import Round


def activation_bytes(ways: Ways, one: Round) -> int:
    """What the largest micro-batch keeps for its backward; a forward on shapes alone, where the model has one."""
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
