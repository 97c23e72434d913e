"""Time the optimizer's update of one rank's rows before training, on tensors of their shapes that nothing keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer
from gossamer.sharding import Holding

_UPDATES = 3  # of a group; the last one counts: the first allocates, and an optimizer may prepare itself in it
_MOST_NUMEL = 1 << 24  # of a group, unless one parameter has more: so much memory, and states and gradients beside it
_MOST_S = 2.0  # then the rest is taken to be like what was timed


def update_seconds(rule: Optimizer, params: Mapping[str, Tensor], holdings: Mapping[str, Holding]) -> float:
    """Return the seconds of an update of the rows that `holdings` own; 0 where nothing can be timed by itself.

    That is so of optimizers that take in vectors of their layers first. `params`: those that are trained.
    """
    if rule.wants_vectors(params):
        return 0.0
    owned = {name: holdings[name].owned.rows for name in params if holdings[name].owned.rows.count}
    shapes = {n: (rows.count, *params[n].shape[1:]) if params[n].dim() else () for n, rows in owned.items()}
    device = next((p.device for p in params.values()), torch.device("cpu"))
    done, spent_s, began = 0, 0.0, time.perf_counter()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for names in _groups(shapes, at_once=rule.has_one_clip):
            rows = {n: torch.rand(shapes[n], dtype=params[n].dtype, device=device) for n in names}
            wholes = {n: tuple(params[n].shape) for n in names}
            spent_s += _once(rule, rows, wholes, {n: owned[n].start for n in names})
            done += sum(prod(shapes[n]) for n in names)
            if time.perf_counter() - began > _MOST_S:
                break
    total = sum(map(prod, shapes.values()))
    return spent_s * total / done if done else 0.0


def _groups(shapes: Mapping[str, tuple[int, ...]], *, at_once: bool) -> Iterator[list[str]]:
    """Yield the names in groups of so many elements that their tensors are few bytes."""
    group, numel = list[str](), 0
    for name, shape in shapes.items():
        if group and numel + prod(shape) > _MOST_NUMEL and not at_once:
            yield group
            group, numel = [], 0
        group.append(name)
        numel += prod(shape)
    if group:
        yield group


def _once(
    rule: Optimizer, rows: Mapping[str, Tensor], wholes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> float:
    """Return the seconds of one update of `rows`, which are their own gradients too."""
    states, taken_s = rule.init_rows(rows, wholes, starts), 0.0
    grads = {name: one.clone() for name, one in rows.items()}
    for step in range(_UPDATES):
        began = time.perf_counter()
        rule.update(rows, grads, states, lr_scale=1.0, step=step)
        if any(one.is_cuda for one in rows.values()):
            torch.cuda.synchronize()
        taken_s = time.perf_counter() - began
    return taken_s
