"""Entry-by-entry comparison of a gradient that differs from that of one process, with a likely cause in words."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, Message
from gossamer.proof.verdict import Fault

_CLOSE = 1e-3  # largest relative residual of a multiple
_HALVES = (torch.bfloat16, torch.float16)


class Picked:
    """The gradient tensor named by a fault, kept in full on the ranks that compute it."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.tensor: Tensor | None = None

    def keep(self, name: str, round: int, gradient: Tensor | None) -> None:
        """Keep a copy of `gradient` if `name` and `round` are the fault's.

        `gradient` None: the parameter has no gradient, which counts as zero.
        """
        if (name, round) == (self.fault.name, self.fault.round):
            found = torch.zeros(()) if gradient is None else gradient.detach().to_dense().cpu()
            self.tensor = (torch.view_as_real(found) if found.is_complex() else found).clone()


def fetched(channel: Channel, mine: Tensor | None, *, of: int, to: int, shape: torch.Size) -> Tensor | None:
    """Return on rank `to` the tensor that rank `of` holds; None on all other ranks.

    Both ranks must call it, others may. `mine`: this rank's tensor, None where it has none; `shape`: its shape on `of`.
    """
    if of == to or channel.rank not in (of, to):
        return mine if channel.rank == to else None
    ranks, size = len(channel.levels.everyone), shape.numel()
    sent, arriving = [0] * ranks, [0] * ranks
    if channel.rank == of:
        assert mine is not None, "a fault is of a rank that has it"
        sent[to] = size
        part = mine.expand(shape).reshape(-1).float()
    else:
        arriving[of] = size
        part = torch.zeros(0)
    shuffle = Message((part,), Collective.SHUFFLE, channel.levels.whole, tuple(sent), tuple(arriving))
    (found,) = channel.start(shuffle).wait()
    return found.view(shape) if channel.rank == to else None


def told_of_entries(got: Tensor, wanted: Tensor, limit: float) -> str:
    """Describe how the entries of `got` differ from those of `wanted`.

    `limit`: differences of up to this fraction of the largest finite entry of `wanted` are rounding.
    """
    got, wanted = got.detach().double(), wanted.detach().double()
    if not wanted.dim():
        got, wanted = got.reshape(1), wanted.reshape(1)
    differ = _differing(got, wanted, limit)
    far = torch.where(differ, (got - wanted).abs().nan_to_num(math.inf, math.inf), -1.0)
    index = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
    count, where = int(differ.sum()), _where(differ)
    if not count:
        return "in a second run no entry differs: the gradient changes from run to run"
    which = f"entry {index} is {float(got[tuple(index)]):.6g}, {float(wanted[tuple(index)]):.6g} in one process"
    said = f"{which}; {count} of {differ.numel()} entries differ{where}"
    cause = _cause(got, wanted, differ)
    return f"{said}: {cause}" if cause else said


def _differing(got: Tensor, wanted: Tensor, limit: float) -> Tensor:
    finite = wanted[wanted.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 1.0
    differ = ~((got - wanted).abs() <= limit * size) & ~(got == wanted)
    return differ if bool(differ.any()) else got != wanted  # each within the limit, but not all together


def _where(differ: Tensor) -> str:
    """Return the contiguous rows, else the columns, that hold all differing entries; "" if there are none such."""
    for dim, name in enumerate(("row", "column")[: min(2, differ.dim())]):
        some = differ.transpose(0, dim).reshape(differ.shape[dim], -1).any(1)
        places = some.nonzero().flatten().tolist()
        low, high = places[0], places[-1]
        if len(places) < len(some) and len(places) == high - low + 1:
            return f", all in {name} {low}" if low == high else f", all in {name}s {low} to {high}"
    return ""


def _cause(got: Tensor, wanted: Tensor, differ: Tensor) -> str:
    """Return the likely cause of the differing entries, in words; "" if no known pattern fits."""
    a, b = got[differ], wanted[differ]
    if not bool(a.isfinite().all()):
        return f"{int((~a.isfinite()).sum())} are not finite"
    if not bool(a.any()):
        return (
            "these are zero, a part is missing" if len(a) < got.numel() else "all entries are zero, no gradient arrives"
        )
    if not bool(b.any()):
        return "they should be zero"
    factor = float((a * b).sum()) / float(b.square().sum())
    if len(a) > 1 and float((a - factor * b).norm()) < _CLOSE * float((a - b).norm()):
        return f"they are {factor:.4g} times what they should be" + _read(factor)
    if len(a) > 1 and _is_same(a.sort().values, b.sort().values, b):
        turned = got.dim() == 2 and got.shape[0] == got.shape[1] and _is_same(got, wanted.T, wanted)
        return "the gradient is transposed" if turned else "they are the same numbers in another order"
    for half in _HALVES:
        if torch.equal(got, got.to(half).double()) and not torch.equal(wanted, wanted.to(half).double()):
            return f"they are rounded to {str(half).removeprefix('torch.')}"
    return ""


def _read(factor: float) -> str:
    """Return the likely cause of a constant factor between two gradients, in words; "" if none fits."""
    if abs(factor + 1) < _CLOSE:
        return " (the sign is flipped)"
    for count in range(2, 65):
        if abs(factor * count - 1) < _CLOSE:
            return f" (a mean over {count} is taken once too often, or {count - 1} of {count} equal parts are missing)"
        if abs(factor / count - 1) < _CLOSE:
            return f" (a part is added {count} times, or a mean over {count} is not taken)"
    return ""


def _is_same(a: Tensor, b: Tensor, sized: Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-5 * sized.abs().max()).all())
