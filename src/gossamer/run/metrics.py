"""Metrics of an evaluation: the user's functions of logits and labels, summed with a count over a validation set."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.loss import Loss
from gossamer.process.stack_position import place_of
from gossamer.spec.errors import BadInput, RunFailed, bad_input
from gossamer.spec.suggest import nearest
from gossamer.spec.watched_figure import metric_names

_KEY = "train.metrics"


@dataclass(frozen=True, slots=True)
class Metric:
    """A function of the user: (logits (*, C), labels (*) with -100 to ignore) -> (sum, count), two numbers.

    `written` is its place, "package.module:function". The metric of a validation set is the sum over the count, both
    added up over all of its micro-batches on all ranks.
    """

    name: str
    written: str
    function: Callable[[Tensor, Tensor], Any]

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum and the count, (2,) float32. Raises RunFailed with the place of an error of the function."""
        try:
            found = self.function(logits, labels)
        except Exception as error:
            raise RunFailed(
                f"the metric {self.written} raised {type(error).__name__}{_place(error)}: {error}"
            ) from error
        if not isinstance(found, (tuple, list)) or len(found) != 2 or not all(map(_is_number, found)):
            raise bad_input(
                wanted=f"a sum and a count from {self.written}, two numbers",
                got=_described(found),
                do="return, for example, (is_right.sum(), is_valid.sum())",
                key=_KEY,
            )
        return torch.stack([torch.as_tensor(one, device=logits.device).float().reshape(()) for one in found])


def load_metrics(written: Sequence[str]) -> tuple[Metric, ...]:
    """Import the functions of `train.metrics`; modules are looked for in the working directory too. Raises BadInput."""
    metric_names(written)
    return tuple(_load(one) for one in written)


def _load(written: str) -> Metric:
    name, _, attribute = written.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # stays: the module may import its neighbors later, when the function is called
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise bad_input(
            wanted=f"to import {name} (looked for in {here} too)",
            got=f"{type(error).__name__}: {error}{_place(error)}",
            do="correct the file, or the name",
            key=_KEY,
        ) from error
    found = vars(module).get(attribute)
    if not callable(found):
        callables = [n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_")]
        raise BadInput(f"{name} has no function {attribute!r}: {nearest(attribute, callables)}", key=_KEY)
    return Metric(attribute, written, found)


def _is_number(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, (int, float))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    return f"a {type(value).__name__}"


def _place(error: BaseException) -> str:
    """Return " at file:line" of the innermost line of the user's own code; "" where there is none."""
    place = place_of(error)
    return f" at {place}" if place else ""


@dataclass(frozen=True, slots=True)
class MeasuredLoss(Loss):
    """A loss that returns its metrics beside it: (1 + 2 M,) float32, the loss and the sum and count of M metrics."""

    inner: Loss
    metrics: tuple[Metric, ...]

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        loss = self.inner(output, batch).float().reshape(1)
        logits, labels = self.inner.predictions(output, batch)
        return torch.cat([loss, *(metric(logits, labels) for metric in self.metrics)])

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.inner.weight(batch)
