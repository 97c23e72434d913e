"""Sparse messages of (value, index) pairs, as used by the exchanges that gather them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.comm.bucket import Layout
from gossamer.comm.message import ExchangeState
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.ops.pack import pack, unpack
from gossamer.spec.errors import bad_input


class FractionExchange(Exchange):
    """An exchange without state that sends `fraction` of a bucket's entries."""

    __slots__ = ()

    @property
    @abstractmethod
    def fraction(self) -> float:
        """Return the fraction of a bucket's entries that is sent, above 0 and up to 1."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise bad_input(wanted="0 < fraction <= 1", got=repr(self.fraction), do="give 0.01", key="fraction")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits()

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()


def count_of(fraction: float, numel: int) -> int:
    """Return the number of entries to send of `numel`: at least one, where there is one."""
    return min(numel, max(1, round(fraction * numel)))


def packed(flat: Tensor, places: Tensor, capacity: int) -> Tensor:
    """Return a message of `capacity` (value, index) pairs of 8 bytes each, padded with zeros at index 0."""
    values, missing = flat[places], capacity - places.numel()
    where = places.int()
    return pack(values, values.new_zeros(missing), where, where.new_zeros(missing))


def mean_of(messages: Tensor, capacity: int, shares: Sequence[float], layout: Layout) -> Tensor:
    """Return sum_i shares[i] message_i, summed in rank order, in the type of the bucket."""
    mean = torch.zeros(layout.numel, dtype=torch.float32, device=messages.device)
    for message, share in zip(messages, shares, strict=True):
        values, where = unpack(message, ((capacity, torch.float32), (capacity, torch.int32)))
        mean.index_add_(0, where, values, alpha=share)
    return mean.to(layout.dtype)


def without(flat: Tensor, places: Tensor) -> Tensor:
    """Return a new `flat` with zeros at `places`."""
    return flat.index_fill(0, places, 0.0)


def taken(flat: Tensor, chosen: Tensor, block: int) -> Tensor:
    """Return the rows `chosen`, ascending, of `flat` in rows of `block`, as (m, block), zero-padded at the end."""
    whole = flat.numel() // block
    rows = flat[: whole * block].view(whole, block)
    if flat.numel() % block == 0 or not chosen.numel() or int(chosen[-1]) < whole:
        return rows.index_select(0, chosen)
    sent = flat.new_zeros(chosen.numel(), block)
    torch.index_select(rows, 0, chosen[:-1], out=sent[:-1])
    sent[-1, : flat.numel() - whole * block] = flat[whole * block :]
    return sent


def placed(rows: Tensor, chosen: Tensor, numel: int) -> Tensor:
    """Return (numel,) with `rows` (m, block) at the places they were taken from, zeros elsewhere."""
    block = rows.shape[1]
    padded = rows.new_zeros(-(-numel // block), block)
    return padded.index_copy_(0, chosen, rows).view(-1)[:numel]
