"""Absent parameters and buffers: those that a stage does not hold."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from gossamer.model.split.absent_tensor import StageAbsence


def make_absent(module: nn.Module, holds: frozenset[str], names: Mapping[str, str], absence: StageAbsence) -> None:
    """Replace every parameter and buffer outside `holds` by an absent one; tied ones stay tied."""
    empty: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            canonical = names.get(f"{path}.{name}" if path else name, "")
            if tensor is None or canonical in holds:
                continue
            if canonical not in empty:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                empty[canonical] = absence.like(tensor, f"the {kind} {canonical or name}")
            setattr(owner, name, empty[canonical])
