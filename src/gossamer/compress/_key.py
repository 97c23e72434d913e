"""Random keys: the same on every run, different for every step, bucket, rank and turn of an exchange."""

from __future__ import annotations

import hashlib

from gossamer.compress.codec import Key
from gossamer.wire.bucket import Layout
from gossamer.wire.message import Round


def key_of(at: Round, layout: Layout, turn: int = 0) -> Key:
    """The key of encoding number `turn` in this exchange of the bucket laid out so."""
    place = (*at.key, layout.entries[0].name if layout.entries else "", turn)
    return Key(shared=_seed(place), own=_seed((*place, at.rank)))


def _seed(place: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big") >> 1
