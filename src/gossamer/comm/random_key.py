"""Random keys: the same on every run, different for every step, bucket or link, rank and turn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ExchangeContext


@dataclass(frozen=True, slots=True)
class Key:
    """Seeds of one encoding: `shared` is the same on all ranks of the exchange, `own` differs from rank to rank."""

    shared: int
    own: int

    def generator(self, device: torch.device) -> torch.Generator:
        """This rank's random numbers for one encoding."""
        return torch.Generator(device).manual_seed(self.own)

    def agreed(self, device: torch.device) -> torch.Generator:
        """Random numbers that all ranks draw alike (one kind of device assumed)."""
        return torch.Generator(device).manual_seed(self.shared)


def key_of(at: ExchangeContext, layout: Layout, turn: int = 0) -> Key:
    """The key of encoding number `turn` in this exchange of the bucket laid out so."""
    return key_at((*at.key, layout.entries[0].name if layout.entries else "", turn), at.rank)


def key_at(place: tuple[int | str, ...], rank: int) -> Key:
    """The key of what `rank` encodes at `place`, a tuple that the ranks agree on and that names one encoding."""
    return Key(shared=_seed(place), own=_seed((*place, rank)))


def _seed(place: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big") >> 1
