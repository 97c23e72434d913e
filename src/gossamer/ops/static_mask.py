"""Static random masks of weight matrices: which elements are trained follows from (seed, name, index) alone.

Equations, for a matrix of n elements and the sparsity s, with h_i splitmix64's output number i of the matrix' stream:
    kept = the n - round(s n) elements with the smallest h_i
Symbols: the stream starts at 64 bits of BLAKE2 of (seed, name); outputs of one stream are distinct, so that the count
is exact. Nothing is stored or sent: a rank, a stage or a shard computes the mask of a matrix and takes its own rows.
Work:    a pass of hashing and a selection over n elements, once.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gossamer.ops.splitmix import outputs

NO_LINEAR_LAYER = (
    *("embed", r"(\b|_)emb(\b|_)", r"\bw[tp]e\b", r"\bshared\.weight$", "relative_attention_bias"),
    *("head", "router", r"\b(\w+_expert_)?gate\.weight$", r"\bclassifier\b", r"\bscore\b", "lora_"),
)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMaskDraw:
    """How masks are drawn: the fraction `sparsity` of every matrix is masked, by `seed`.

    `parameters`: regular expressions of the names of masked parameters; empty: every parameter of two dimensions whose
    name does not look like that of an embedding, a head, a router or an adapter.
    """

    sparsity: float
    seed: int
    parameters: tuple[str, ...] = ()

    def covers(self, name: str, shape: Shape) -> bool:
        """Return whether a parameter has a mask."""
        found = any(re.search(pattern, name) for pattern in self.parameters or NO_LINEAR_LAYER)
        return found if self.parameters else not found and len(shape) == 2

    def kept_count(self, name: str, shape: Shape) -> int:
        """Return the number of elements of a parameter that are trained; all where it has no mask."""
        numel = prod(shape)
        return numel - round(self.sparsity * numel) if self.covers(name, shape) else numel

    def kept(self, name: str, shape: Shape, device: torch.device) -> Tensor:
        """Return the mask of a covered parameter, in its shape: True where an element is trained."""
        numel, count = prod(shape), self.kept_count(name, shape)
        if device.type == "meta":
            return torch.empty(shape, dtype=torch.bool, device=device)
        if not count:
            return torch.zeros(shape, dtype=torch.bool, device=device)
        words = outputs(_key(self.seed, name), 0, numel, device)
        return words.le_(words.kthvalue(count).values).bool().view(shape)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"static mask {seed} {name}".encode(), digest_size=8).digest(), "big")
