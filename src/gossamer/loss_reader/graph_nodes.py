"""Access to autograd graph nodes: the name of the operation, sizes, reduced dimensions, and saved tensors.

`kept` and `several_kept` never unpack a tensor saved behind hooks (activation checkpointing, offloading), as that would
run the user's forward again. `saved` unpacks any attribute.
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
REDUCING = ("Mean", "Sum", "Nansum")


@dataclass(frozen=True, slots=True)
class GraphScalar:
    """A scalar in a loss's graph. `is_computed`: whether it is a tensor's value, not a Python number of the loop."""

    value: float
    is_computed: bool


def op_name(node: Any) -> str:
    """Return the operation's name: "Mul" of MulBackward0."""
    return _short(node.name())


@functools.cache
def _short(name: str) -> str:
    return name.rpartition("::")[2].split("Backward")[0]


def below(node: Any) -> list[Any]:
    """Return the nodes of the inputs; None in place of an input without a gradient."""
    return [one for one, _ in node.next_functions]


def nodes_below(node: Any) -> list[Any]:
    """Return the nodes of those inputs that have a gradient."""
    return [one for one in below(node) if one is not None]


def side_without_gradient(node: Any, first: str = "self", second: str = "other") -> str:
    """Return the name under which a node of two inputs has saved the one without a gradient: `first` or `second`."""
    return first if below(node)[0] is None else second


def made(node: Any, output: int = 0) -> tuple[int, ...]:
    """Return the sizes of an output tensor; () if there is no such output."""
    metadata = node._input_metadata
    return tuple(metadata[output].shape) if output < len(metadata) else ()


def saved(node: Any, name: str) -> Any:
    """Return an attribute that the node has saved, unpacked; None if it has none of this name."""
    return getattr(node, f"_saved_{name}", None)


def kept(node: Any, name: str) -> Tensor | None:
    """Return a tensor that the node has saved without hooks; None if there is none."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return _plain(raw, lambda: saved(node, name))


def several_kept(node: Any, name: str) -> list[Tensor | None]:
    """Return the tensors of a saved list; None in place of each if any is behind hooks."""
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
    """Return the dimensions, of `sizes`, that the node reduced; all of them for a full reduction."""
    given = saved(node, "dim")
    if given is None:
        given = saved(node, "dims")
    if given is None or given == () or not sizes:
        return tuple(range(len(sizes)))
    return tuple(signed(dim) % len(sizes) for dim in ((given,) if isinstance(given, int) else given))


def signed(number: int) -> int:
    """Return the signed value of an integer, as nodes save negative numbers as unsigned 64-bit ones."""
    return number if number < 2**63 else number - 2**64


def sizes_before(node: Any) -> tuple[int, ...]:
    """Return the sizes of a reduction's input; () if they are not saved."""
    found = saved(node, "self_sym_sizes")
    if found is None:
        one = kept(node, "self")
        return tuple(one.shape) if one is not None else ()
    return tuple(found)


def constant(node: Any, name: str) -> GraphScalar | None:
    """Return the scalar that the node has saved under `name`; None if it is no scalar."""
    return number(saved(node, name))


def number(value: Any) -> GraphScalar | None:
    """Return a Python number or one-element tensor as a scalar; None for anything else."""
    if isinstance(value, Tensor):
        return GraphScalar(float(value), _is_tensors_own(value)) if value.numel() == 1 else None
    return GraphScalar(float(value), is_computed=False) if isinstance(value, (int, float)) else None


def _is_tensors_own(value: Tensor) -> bool:
    """Return whether a node saved a tensor of the loop, and not a Python number that torch converted: a converted one
    does not take part in type promotion.
    """
    if value.dim():
        return True
    other = torch.ones((), dtype=torch.float16 if value.is_floating_point() else torch.int8)
    return torch.result_type(value, other) != other.dtype or value.dtype == other.dtype


def is_parameter(node: Any) -> bool:
    """Return whether the node is a parameter, directly or through views and transposes."""
    while op_name(node) in PASSING:
        node = node.next_functions[0][0]
        if node is None:
            return False
    return op_name(node) == "AccumulateGrad"
