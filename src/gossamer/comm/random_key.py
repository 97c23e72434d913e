"""Random keys: the same on every run, different for every step, bucket or link, rank and encoding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ExchangeContext


@dataclass(frozen=True, slots=True)
class Key:
    """The seeds of one encoding: `shared` is the same on all ranks of the exchange, `own` differs from rank to rank."""

    shared: int
    own: int

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this rank's random generator for one encoding."""
        return torch.Generator(device).manual_seed(self.own)

    def agreed(self, device: torch.device) -> torch.Generator:
        """Return a random generator with the same draws on all ranks (one kind of device assumed)."""
        return torch.Generator(device).manual_seed(self.shared)


def key_of(at: ExchangeContext, layout: Layout, turn: int = 0) -> Key:
    """Return the key of encoding number `turn` in this exchange of the bucket with `layout`."""
    return key_at((*at.key, layout.entries[0].name if layout.entries else "", turn), at.rank)


def key_at(place: tuple[int | str, ...], rank: int) -> Key:
    """Return the key of what `rank` encodes at `place`: a tuple that names one encoding and is equal on all ranks."""
    return Key(shared=_seed(place), own=_seed((*place, rank)))


def _seed(place: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big") >> 1
