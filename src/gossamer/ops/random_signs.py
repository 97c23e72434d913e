"""Random directions of +1 and -1 from a counter-based generator: entry i depends on (key, i) alone; nothing is stored.

Paper: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (splitmix64).
Equations, for entry i of n, in block B = i // BLOCK, which has W = min(BLOCK, n - B BLOCK) / 32 words, rounded up:
    z_i = -1 where bit 31 - j // W of word j % W is set, else +1,   j = i % BLOCK
    word w of block B = the upper half of splitmix64's output number B BLOCK / 32 + w of the stream that starts at key
Only integers decide, modulo 2^64, and each term adds exactly +c or -c. So a sum of directions, term by term, has the
same bits on every kind of device and in every version. Random numbers of torch's own generators have not.
Work:    10 integer operations per 32 entries, 4 operations (3 ns) per entry and term.   Memory: 2 blocks of 256 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gossamer.ops.splitmix import outputs

BLOCK = 1 << 16  # entries; a part of what a direction is
_TOP = -(2**31)


def signed_sums(numel: int, terms: Sequence[tuple[int, float]], device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield sum_k c_k z(key_k) over the `terms` (key, c), float32, in pieces: (slice of the (numel,) whole, piece).

    Terms are added in their order. A piece is valid until the next one.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=device)[:, None]
    for start in range(0, numel, BLOCK):
        size = min(BLOCK, numel - start)
        count = -(-size // 32)
        total = torch.zeros(32 * count, dtype=torch.float32, device=device)
        for key, value in terms:
            signs = _words(key, start // 32, count, device) << shifts  # (32, count)
            signs.bitwise_and_(_TOP).bitwise_xor_(_bits(value))
            total.add_(signs.view(torch.float32).view(-1))
        yield slice(start, start + size), total[:size]


def _words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return the upper halves of `count` outputs of the stream from number `first` on, (count,) int32."""
    return (outputs(key, first, count, device) >> 32).to(torch.int32)


def _bits(value: float) -> int:
    """Return the bits of the float32 nearest to `value`."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
