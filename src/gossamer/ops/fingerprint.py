"""Fingerprints of tensors: a projection that preserves distances, and a digest that changes with a single bit.

Equations (element k of all tensors one behind the other; r_k a word that depends on a seed and k alone):
    p_b    = sum_{k mod width = b} s_k x_k,   s_k = +1 or -1, a bit of r_k        (float64)
    digest = sum_k bits(x_k) (2 r_k + 1)  mod 2^64
E |p(x) - p(y)|^2 = |x - y|^2 over seeds: the distance of two fingerprints estimates that of the tensors. A digest
misses the change of one number with a probability of 2^-32 at most.
The words come from a counter, not from a generator: the same on all kinds of device.
Paper:   Achlioptas, Database-friendly random projections, 2003; classes as in feature hashing, arXiv 0902.2206.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements at a time; a multiple of every width that is a power of two
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def projected(tensors: Iterable[Tensor], seed: int, *, width: int) -> Tensor:
    """Return the norm and the projections of the tensors, (1 + width,) float64. `width` is a power of two."""
    norm, total = 0.0, torch.zeros(width, dtype=torch.float64)
    for start, piece in _pieces(tensors):
        numbers = piece.double()
        norm += float(numbers.square().sum())
        words = _words(seed, start, numbers)
        signed = numbers * (1 - 2 * ((words >> 40) & 1))
        before = start % width
        padded = torch.nn.functional.pad(signed, (before, -(before + len(signed)) % width))
        total += padded.view(-1, width).sum(0).cpu()
    return torch.cat([torch.tensor([norm**0.5], dtype=torch.float64), total])


def digest(tensors: Iterable[Tensor], seed: int) -> int:
    """Return a digest of the tensors' bits, 64 bits."""
    found = 0
    for start, piece in _pieces(tensors):
        bits = piece.view(_BITS[piece.element_size()]).long()
        found += int((bits * (2 * _words(seed, start, bits) + 1)).sum())
    return found % 2**64


def _pieces(tensors: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of its first element, flat piece) over all tensors."""
    start = 0
    for tensor in tensors:
        for piece in tensor.detach().reshape(-1).split(_CHUNK):  # type: ignore[no-untyped-call]
            if piece.numel():
                yield start, piece
            start += piece.numel()


def _words(seed: int, start: int, like: Tensor) -> Tensor:
    """Return (len(like),) int64: a murmur-like finalizer of (seed, index); overflow wraps."""
    x = torch.arange(start, start + len(like), device=like.device, dtype=torch.int64)
    x = (x + (seed % 2**62)) * -7046029254386353131
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * -4417276706812531889
    return x ^ ((x >> 29) & 0x7FFFFFFFF)
