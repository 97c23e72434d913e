"""Check that all ranks start with the same initial values: replicas of a stage, and stages that share a parameter."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gossamer.comm.channel import Channel, gathered
from gossamer.model.split.constructor_state import digests_of, tensors_of
from gossamer.ops.fingerprint import projected
from gossamer.run.staged_model import StagedModel
from gossamer.spec.errors import bad_input
from gossamer.spec.odd_one_out import parted, ranked

_UNSEEN = -1.0
_WIDTH = 4  # projections of a tensor
_ROUNDING = 1e-5  # relative to a tensor's norm: how far equal draws may differ on other processors
_log = logging.getLogger(__name__)


def check_initial(channel: Channel, module: nn.Module, cut: StagedModel | None) -> None:
    """Check that the initial values which two ranks have seen are equal; all ranks must call it, each with its module.

    Values that a rank built and freed count too: a constructor that differs between ranks is found even where their
    stages share no parameter. The comparison is bit by bit, but ranks on different kinds of processors may differ by
    rounding, which is logged as a warning. Raises BadInput.
    """
    digests = digests_of(module) if cut is None else cut.digests
    names = ["", *tensors_of(module if cut is None else cut.ways.module)]
    rows = gathered(channel, [_machine(), *(float(digests.get(name, _UNSEEN)) for name in names)])
    machines = rows[:, 0].tolist()
    differ: dict[str, dict[int, float]] = {}
    for column, name in enumerate(names, start=1):
        seen = {rank: number for rank, number in enumerate(rows[:, column].tolist()) if number != _UNSEEN}
        if len(set(seen.values())) > 1:
            differ[name] = seen
    if not differ:
        return
    if len(set(machines)) > 1:
        held = {n: x for n, x in tensors_of(module).items() if cut is None or n in cut.holds}
        far = _far(channel, held, list(differ))
        if not far:
            said = "initial values differ between ranks by rounding, as their processors differ: %s"
            _log.warning(said, _said(differ))
            return
        differ = {name: differ[name] for name in far}
    raise bad_input(
        wanted="the same initial values on all ranks",
        got=f"different values for {_said(differ)}",
        do="draw initial values from torch, random or numpy.random, which train.seed seeds, and not from generators "
        "that the clock, the system or the rank seeds; if you pass a module, set the seed before you create it",
        key="model",
    )


def _far(channel: Channel, held: Mapping[str, Tensor], names: list[str]) -> list[str]:
    """Return the names of tensors in which ranks that hold them differ by more than rounding. All ranks call it."""
    unknown = [math.nan] * (1 + _WIDTH)
    mine = [number for name in names for number in (_projected(held[name]) if name in held else unknown)]
    everyone = gathered(channel, mine).view(-1, len(names), 1 + _WIDTH)
    far = []
    for i, name in enumerate(names):
        those = everyone[:, i][~everyone[:, i, 0].isnan()]
        if len(those) and bool(((those - those[0]).abs() > _ROUNDING * those[0, 0]).any()):
            far.append(name)
    return far


def _projected(tensor: Tensor) -> list[float]:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    numbers: list[float] = projected([real.nan_to_num()], 0, width=_WIDTH).tolist()
    return numbers


def _said(differ: Mapping[str, Mapping[int, float]]) -> str:
    name, seen = next(iter(differ.items()))
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"{name or 'the operations in the constructor'}{more}: {_who(seen)}"


def _who(seen: Mapping[int, float]) -> str:
    if len(seen) == max(seen) + 1:
        return parted([*seen.values()])
    first = next(iter(seen.values()))
    odd = [rank for rank, number in seen.items() if number != first]
    same = [rank for rank, number in seen.items() if number == first]
    return f"{ranked(same)} and {ranked(odd)} differ"


def _machine() -> float:
    """Return a number for all that the last bits of computed values may depend on; exact in float64."""
    said = f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
    return float(int.from_bytes(hashlib.sha256(said.encode()).digest()[:6], "big"))
