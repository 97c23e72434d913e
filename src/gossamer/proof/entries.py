"""Entry by entry: how a gradient that is another one differs from that of one process, and what that looks like."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, Message
from gossamer.proof.verdict import Fault

_CLOSE = 1e-3  # of what differs, that may be left where it is a multiple
_HALVES = (torch.bfloat16, torch.float16)


class Picked:
    """The gradient of a fault, kept whole where it is known."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.tensor: Tensor | None = None

    def keep(self, name: str, round: int, gradient: Tensor | None) -> None:
        """Told of gradients; None: there is none, and it counts as zero."""
        if (name, round) == (self.fault.name, self.fault.round):
            found = torch.zeros(()) if gradient is None else gradient.detach().to_dense().cpu()
            self.tensor = (torch.view_as_real(found) if found.is_complex() else found).clone()


def fetched(channel: Channel, mine: Tensor | None, *, of: int, to: int, shape: torch.Size) -> Tensor | None:
    """On rank `to`, what rank `of` has of a tensor; both call it, others may, with None for what they have not."""
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
    """`got` in place of `wanted`, of which parts of the largest up to `limit` are rounding."""
    got, wanted = got.detach().double(), wanted.detach().double()
    if not wanted.dim():
        got, wanted = got.reshape(1), wanted.reshape(1)
    differ = _differing(got, wanted, limit)
    far = torch.where(differ, (got - wanted).abs().nan_to_num(math.inf, math.inf), -1.0)
    index = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
    count, where = int(differ.sum()), _where(differ)
    if not count:
        return "asked again, no entry differs: it is another one each time"
    which = f"entry {index} is {float(got[tuple(index)]):.6g}, and {float(wanted[tuple(index)]):.6g} in one process"
    said = f"{which}; {count} of {differ.numel()} entries differ{where}"
    cause = _cause(got, wanted, differ)
    return f"{said}: {cause}" if cause else said


def _differing(got: Tensor, wanted: Tensor, limit: float) -> Tensor:
    finite = wanted[wanted.isfinite()].abs()
    size = float(finite.max()) if finite.numel() else 1.0
    differ = ~((got - wanted).abs() <= limit * size) & ~(got == wanted)
    return differ if bool(differ.any()) else got != wanted  # many that are rounding each, and not together


def _where(differ: Tensor) -> str:
    """The rows they are in, or else the columns, where these are some of them, one behind the other."""
    for dim, name in enumerate(("row", "column")[: min(2, differ.dim())]):
        some = differ.transpose(0, dim).reshape(differ.shape[dim], -1).any(1)
        places = some.nonzero().flatten().tolist()
        low, high = places[0], places[-1]
        if len(places) < len(some) and len(places) == high - low + 1:
            return f", all in {name} {low}" if low == high else f", all in {name}s {low} to {high}"
    return ""


def _cause(got: Tensor, wanted: Tensor, differ: Tensor) -> str:
    """What it looks like; "": nothing in particular."""
    a, b = got[differ], wanted[differ]
    if not bool(a.isfinite().all()):
        return f"{int((~a.isfinite()).sum())} are not finite"
    if not bool(a.any()):
        return "they are zero, a part is missing" if len(a) < got.numel() else "all of it is zero, nothing arrives"
    if not bool(b.any()):
        return "they should be zero"
    factor = float((a * b).sum()) / float(b.square().sum())
    if len(a) > 1 and float((a - factor * b).norm()) < _CLOSE * float((a - b).norm()):
        return f"they are {factor:.4g} times what they should be" + _read(factor)
    if len(a) > 1 and _is_same(a.sort().values, b.sort().values, b):
        turned = got.dim() == 2 and got.shape[0] == got.shape[1] and _is_same(got, wanted.T, wanted)
        return "it is transposed" if turned else "they are the same numbers in other places"
    for half in _HALVES:
        if torch.equal(got, got.to(half).double()) and not torch.equal(wanted, wanted.to(half).double()):
            return f"they are rounded to {str(half).removeprefix('torch.')}"
    return ""


def _read(factor: float) -> str:
    """What a factor points at."""
    if abs(factor + 1) < _CLOSE:
        return " (the sign is another)"
    for count in range(2, 65):
        if abs(factor * count - 1) < _CLOSE:
            return f" (a mean over {count} is taken once too often, or {count - 1} of {count} equal parts are missing)"
        if abs(factor / count - 1) < _CLOSE:
            return f" (a part is added {count} times, or a mean over {count} is not taken)"
    return ""


def _is_same(a: Tensor, b: Tensor, sized: Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-5 * sized.abs().max()).all())
