"""Hadamard: rotates groups of 32 numbers before another codec, so that no block is ruled by one large number.

Equations (per group g of 32):
    C(x)_g = C'(H D x_g);   decoded_g = D H decoded'_g / 32
Symbols: H symmetric, of +1 and -1, H H = 32 I exactly; D signs drawn from the shared key, or I without `signs`; C'
`inner`. |H D x|^2 = 32 |x|^2, so what `inner` promises of its error holds here too.
Wire:    that of `inner` for numel padded to 32.   Work: 6 numel flop of butterflies and a product with 16 x 16.
Paper:   SDP4Bit, arXiv 2410.15526 (H32 in groups); Suresh et al., arXiv 1611.00429 (random signs).
Good when: `inner` has few levels and its blocks have outliers.   Not for: `lossless`, `sign` of one-hot rows.
Numbers beyond 1e37 may become infinite in the sum of 32; one that is not finite makes its group so. Where ranks have
different processors, sums of 16 may end in another last bit on each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.hadamard import GROUP, hadamard


@dataclass(frozen=True, slots=True)
class Hadamard(Codec):
    """A codec that rotates numbers and encodes them with `inner`; `signs` draws another rotation for every step."""

    inner: Codec
    signs: bool = False

    @property
    def traits(self) -> CodecTraits:
        inner = self.inner.traits
        delta = None if inner.contraction is None else min(inner.contraction, 1 - 1e-12)
        return replace(inner, lossless=False, contraction=1 - 1e-12 if inner.lossless else delta)  # float32 sums round

    @property
    def block(self) -> int:
        return lcm(GROUP, self.inner.block)

    def nbytes(self, numel: int) -> int:
        return self.inner.nbytes(_padded(numel))

    def encode(self, x: Tensor, key: Key) -> Tensor:
        missing = -x.shape[-1] % GROUP
        rows = pad(x, (0, missing)) if missing else x.contiguous()
        rotated = torch.empty_like(rows)
        hadamard(rows.view(-1), rotated.view(-1), before=self._drawn(key, x.device))
        return self.inner.encode(rotated, key)

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        rows = self.inner.decode(message, _padded(numel), key).contiguous()
        drawn = self._drawn(key, rows.device)
        back = torch.full((GROUP,), 1 / GROUP, device=rows.device) if drawn is None else drawn / GROUP
        hadamard(rows.view(-1), rows.view(-1), after=back)
        return rows if rows.shape[-1] == numel else rows[..., :numel].contiguous()

    def _drawn(self, key: Key, device: torch.device) -> Tensor | None:
        if not self.signs:
            return None
        bits = torch.randint(2, (GROUP,), generator=key.agreed(device), device=device)
        return (1 - 2 * bits).float()


def _padded(numel: int) -> int:
    return -(-numel // GROUP) * GROUP
