"""Random keys: the same on every run, different for every step, bucket or link, rank and turn."""

from __future__ import annotations

import hashlib

from gossamer.compress.codec import Key
from gossamer.wire.bucket import Layout
from gossamer.wire.message import Round


def key_of(at: Round, layout: Layout, turn: int = 0) -> Key:
    """The key of encoding number `turn` in this exchange of the bucket laid out so."""
    return key_at((*at.key, layout.entries[0].name if layout.entries else "", turn), at.rank)


def key_at(place: tuple[int | str, ...], rank: int) -> Key:
    """The key of what `rank` encodes at `place`, a tuple that the ranks agree on and that names one encoding."""
    return Key(shared=_seed(place), own=_seed((*place, rank)))


def _seed(place: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big") >> 1
