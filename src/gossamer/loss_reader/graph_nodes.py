"""What a node of an autograd graph says of the step that made it: its name, sizes, dimensions, and what it keeps.

A tensor that is kept behind hooks (a checkpoint's, one on another device) is never asked for: to unpack it would run
somebody's forward again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PASSING = {
    *("Neg", "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy"),
    *("Permute", "Transpose", "T", "Contiguous"),
}


@dataclass(frozen=True, slots=True)
class NodeInputs:
    """A number in a loss. `is_computed`: it is a tensor's, and not one that was written in the loop."""

    value: float
    is_computed: bool


def name_of(node: Any) -> str:
    """ "Mul" of MulBackward0."""
    return _short(node.name())


@functools.cache
def _short(name: str) -> str:
    return name.rpartition("::")[2].split("Backward")[0]


def below(node: Any) -> list[Any]:
    """The nodes that it was made of; None in place of what has no gradient."""
    return [one for one, _ in node.next_functions]


def made(node: Any, output: int = 0) -> tuple[int, ...]:
    """The sizes of what it makes."""
    metadata = node._input_metadata
    return tuple(metadata[output].shape) if output < len(metadata) else ()


def saved(node: Any, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)


def kept(node: Any, name: str) -> Tensor | None:
    """A tensor that it keeps as it is; None where it keeps none, or behind hooks."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return _plain(raw, lambda: saved(node, name))


def several_kept(node: Any, name: str) -> list[Tensor | None]:
    """Those of a list that it keeps."""
    raw = getattr(node, f"_raw_saved_{name}", None) or ()
    whole = saved(node, name) if all(one is None or _is_plain(one) for one in raw) else [None] * len(raw)
    return [one if isinstance(one, Tensor) else None for one in whole or ()]


def _plain(raw: Any, unpacked: Any) -> Tensor | None:
    if raw is None or not _is_plain(raw):
        return None
    found = unpacked()
    return found if isinstance(found, Tensor) else None


def _is_plain(raw: Any) -> bool:
    return getattr(raw, "unpack_hook", None) is None


def dims_of(node: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions, of `sizes`, that a step reduced; of one over all, every one."""
    given = saved(node, "dim")
    if given is None:
        given = saved(node, "dims")
    if given is None or given == () or not sizes:
        return tuple(range(len(sizes)))
    return tuple(signed(dim) % len(sizes) for dim in ((given,) if isinstance(given, int) else given))


def signed(number: int) -> int:
    """Nodes keep negative numbers as if they had no sign."""
    return number if number < 2**63 else number - 2**64


def sizes_before(node: Any) -> tuple[int, ...]:
    """Of what a reduction was given."""
    found = saved(node, "self_sym_sizes")
    if found is None:
        one = kept(node, "self")
        return tuple(one.shape) if one is not None else ()
    return tuple(found)


def constant(node: Any, name: str) -> NodeInputs | None:
    return number(saved(node, name))


def number(value: Any) -> NodeInputs | None:
    if isinstance(value, Tensor):
        return NodeInputs(float(value), _is_tensors_own(value)) if value.numel() == 1 else None
    return NodeInputs(float(value), is_computed=False) if isinstance(value, (int, float)) else None


def _is_tensors_own(value: Tensor) -> bool:
    """Whether a node keeps a tensor of the loop, and not a Python number that torch made one of: such a one gives way
    to the type of any tensor.
    """
    if value.dim():
        return True
    other = torch.ones((), dtype=torch.float16 if value.is_floating_point() else torch.int8)
    return torch.result_type(value, other) != other.dtype or value.dtype == other.dtype


def is_parameter(node: Any) -> bool:
    """A parameter, as it is or turned."""
    while name_of(node) in PASSING:
        node = node.next_functions[0][0]
        if node is None:
            return False
    return name_of(node) == "AccumulateGrad"
