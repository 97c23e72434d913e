"""Selection of few entries among many: those above a threshold, and the largest ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.ops import bits

_CHUNK = 1 << 18  # numbers worked on at a time: their mask stays in the cache
_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign; as integers they are ordered like magnitudes
_FEWEST = 1 << 14  # numbers of a sample
_HITS = 64  # numbers of a sample that should lie above the threshold


def magnitudes(x: Tensor) -> Tensor:
    """Return the bits of |x| as int32: ordered like |x|, with infinity and then NaN at the top."""
    return x.view(torch.int32).bitwise_and(_MAGNITUDE)


def at_least(x: Tensor, threshold: int) -> Tensor:
    """Return the indices, int64 and ascending, where magnitudes(x) >= threshold, of x (numel,) float32, read once."""
    words, found = x.view(torch.int32), []
    buffer = torch.empty(min(_CHUNK, x.numel()), dtype=torch.int32, device=x.device)
    mask = torch.empty(buffer.shape, dtype=torch.bool, device=x.device)
    for start in range(0, x.numel(), _CHUNK):
        here = words[start : start + _CHUNK]
        size = torch.bitwise_and(here, _MAGNITUDE, out=buffer[: here.numel()])
        found.append(places_of(torch.ge(size, threshold, out=mask[: here.numel()])).add_(start))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)


def places_of(mask: Tensor) -> Tensor:
    """Return the indices set in a sparse mask (numel,) bool, int64 and ascending; tests eight elements at once."""
    whole = mask.numel() // 8 * 8
    words = mask[:whole].view(torch.int64)
    hit = words.nonzero().view(-1)
    inside = words[hit].view(torch.bool).nonzero().view(-1)
    places = hit[inside >> 3].mul_(8).add_(inside & 7)
    rest = mask[whole:].nonzero().view(-1).add_(whole)
    return torch.cat((places, rest)) if rest.numel() else places


def to_bits(mask: Tensor) -> Tensor:
    """Pack a mask (numel,) bool to (ceil(numel / 8),) uint8. The mask may be overwritten."""
    missing = -mask.numel() % 8
    return bits.pack(
        torch.cat((mask, mask.new_zeros(missing))).view(torch.int8) if missing else mask.view(torch.int8), 1
    )


def places_of_bits(packed: Tensor) -> Tensor:
    """Return the indices of the bits set by `to_bits`, int64 and ascending."""
    hit = packed.nonzero().view(-1)
    signs = torch.empty(8 * hit.numel(), dtype=torch.int8, device=packed.device)
    bits.unpack(packed[hit], 1, signs)
    inside = (signs < 0).nonzero().view(-1)
    return hit[inside >> 3].mul_(8).add_(inside & 7)


def count_bits(packed: Tensor) -> int:
    """Return the number of bits set: much cheaper than finding them where they are many."""
    ones = torch.tensor([byte.bit_count() for byte in range(256)], device=packed.device)
    return int(torch.bincount(packed.int(), minlength=256).mul_(ones).sum())


def sampled_threshold(x: Tensor, k: int, rng: torch.Generator, *, margin: float) -> int:
    """Return the bits of a magnitude that slightly more than k of x reach, by `margin` standard errors of the sample.

    At least 1, so that zeros are never above it. 0 < k <= numel.
    """
    size = max(_FEWEST, _HITS * x.numel() // k)
    picked = torch.randint(x.numel(), (size,), generator=rng, device=x.device)
    hits = size * k / x.numel()
    rank = min(size, int(hits + margin * hits**0.5) + 1)
    return max(1, int(magnitudes(x[picked]).topk(rank, sorted=False).values.min()))


def is_small(numel: int, k: int) -> bool:
    """Return whether a sampled threshold would not pay off: the tensor is small, or k is 0 or more than half of it."""
    return k == 0 or numel <= 2 * max(_FEWEST, _HITS * numel // k) or 2 * k > numel


def largest(x: Tensor, k: int, rng: torch.Generator) -> Tensor:
    """Return the indices of the k largest magnitudes of x (numel,) float32, exactly and in no order; NaN is largest.

    A sampled threshold leaves a few more than k candidates to select from: 10 times faster than selecting from all.
    """
    numel = x.numel()
    if is_small(numel, k):
        return x.abs().topk(k, sorted=False).indices
    candidates = at_least(x, sampled_threshold(x, k, rng, margin=4.0))
    if candidates.numel() < k:  # fewer than k numbers are not zero, or one sample in 30 000
        return x.abs().topk(k, sorted=False).indices
    return candidates[magnitudes(x[candidates]).topk(k, sorted=False).indices]


def used_blocks(flat: Tensor, block: int) -> Tensor:
    """Return (blocks,) bool: whether any number of a block is not zero. `block`: 1, or a multiple of 8 numbers."""
    missing = -flat.numel() % block
    used = (pad(flat, (0, missing)) if missing else flat) != 0
    if block == 1 or not used.numel():
        return used
    return used.view(torch.int64).view(-1, block // 8).amax(1) != 0  # bytes of 0 or 1, read eight at a time
