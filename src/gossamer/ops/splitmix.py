"""Random words that depend on (key, index) alone: the same on every kind of device and in every version of torch.

Paper: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (splitmix64).
Equations: output number i of the stream that starts at key is mix(key + (i + 1) g) modulo 2^64, g the golden constant.
For one key the map from i to the output is one to one: no two of the outputs are equal.
Work:    10 integer operations per output.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def outputs(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return `count` outputs of the stream from number `first` on, (count,) int64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    x.mul_(_GOLDEN).add_(_signed(key))
    x.bitwise_xor_(_shifted(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(key: int) -> int:
    """Return the same 64 bits as a signed number."""
    return ((key + 2**63) & (2**64 - 1)) - 2**63
