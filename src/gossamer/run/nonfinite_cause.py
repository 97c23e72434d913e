"""Find the source of a non-finite value in a step before the first update, where the learning rate is not the cause.

The step runs once more under observation: parameters, the batch, the output of every module, the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from gossamer.model.split.absent_tensor import AbsentTensor

_NOTHING = -1
_COLUMNS = ("stage", "parameter", "column", "given", "outcome", "gradient")  # of the row that a rank sends


@dataclass(slots=True)
class NonFiniteSite:
    """The first module with a non-finite output in a step on one rank, by index in `module.modules()`; -1: none.

    `apart`: what this rank has of the parameters that are in memory only while their unit runs, by name.
    """

    module: nn.Module
    apart: Mapping[str, Tensor] = field(default_factory=dict)
    inner: int = _NOTHING  # the first module with a non-finite output; of nested ones the innermost
    is_given: bool = False  # whether its inputs were non-finite too
    turned: set[str] = field(default_factory=set)  # parameters of which a gradient was non-finite
    _names: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the outputs of all modules, and the gradients, during the step that runs inside this context."""
        self._names = {id(inner): number for number, inner in enumerate(self.module.modules())}
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_hook(self._look, with_kwargs=True).remove)
            for name, param in self.module.named_parameters():
                if param.requires_grad and not isinstance(param, AbsentTensor):
                    hook = param.register_hook(functools.partial(self._turn, name))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield

    def _turn(self, name: str, gradient: Tensor) -> None:
        if _is_bad(gradient):
            self.turned.add(name)

    def _look(self, inner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.inner == _NOTHING and id(inner) in self._names and not _is_finite(tree_leaves(output)):
            self.inner = self._names[id(inner)]
            self.is_given = not _is_finite(tree_leaves((args, kwargs)))


@dataclass(frozen=True, slots=True)
class NonFiniteCause:
    """The first non-finite value over all ranks: its kind, its `name`, and the rank."""

    what: str = ""  # "parameter" | "column" of the batch | "given" to a module | "outcome" of one | "gradient"; "": no
    name: str = ""
    rank: int = 0

    def told(self, loss: float) -> str:
        """Return the cause and a remedy as text. `loss`: that of the step."""
        if not self.what or (self.what == "gradient" and not math.isfinite(loss)):
            return _UNSEEN if math.isfinite(loss) else _OF_THE_LOSS
        return _SAID[self.what].format(name=self.name, rank=self.rank)


_SAID = {
    "parameter": "parameter or buffer {name} on rank {rank} is not finite at the start of the run: check its initial "
    "value, or the weights that were loaded",
    "column": "the batch on rank {rank} has values in {name} that are not finite: check the data",
    "given": "the first value that is not finite is an input of {name} on rank {rank}: check the code before that call",
    "outcome": "the first value that is not finite is the output of {name} on rank {rank}, whose inputs are finite: "
    "check the computation in {name} (a division by 0, a logarithm, values too large for train.precision)",
    "gradient": "the loss is finite, and the first gradient in the backward pass that is not finite is that of {name} "
    "on rank {rank}: check how {name} is used (the root or the norm of 0, a division by 0 that a mask hides, values "
    "too large for train.precision)",
}
_OF_THE_LOSS = "the outputs of all modules are finite, and the loss is not: check the loss function and the labels"
_UNSEEN = "all values were finite when the step was repeated: check the memory and processor of that machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The group of ranks that searches for the cause together."""

    gather: Callable[[tuple[float, ...]], Tensor]  # returns the row of every rank
    numbers: Sequence[int]  # the rank of each row
    bad: Sequence[int]  # ranks whose own gradient is non-finite, before any average


def cause_of(
    sight: NonFiniteSite,
    stage: int,
    rows: Sequence[Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor],
    ranks: Ranks,
) -> NonFiniteCause:
    """Return the first non-finite value of a step that was watched; all ranks of the group must call it.

    `stage`: the first stage that this rank holds. Parameters and batch columns come before module inputs and outputs,
    and earlier stages before later ones. Of gradients, the earliest in the backward pass counts. `gradients` may lack
    those that were taken over by what updates parameters; of these the ones seen count.
    """
    held = {**dict(sight.module.named_parameters()), **dict(sight.module.named_buffers()), **sight.apart}
    inners = [name or "the model" for name, _ in sight.module.named_modules()]
    columns = list(rows[0]) if rows else []
    finite = {name: bool(gradients[name].isfinite().all()) for name in held if name in gradients}
    finite |= dict.fromkeys(sight.turned - finite.keys(), False)
    order = list(held)
    mine = (
        float(stage),
        float(next((n for n, one in enumerate(held.values()) if _is_bad(one)), _NOTHING)),
        float(next((n for n, name in enumerate(columns) if any(_is_bad(one[name]) for one in rows)), _NOTHING)),
        float(sight.inner if sight.is_given else _NOTHING),
        float(sight.inner if not sight.is_given else _NOTHING),
        float(max((n for n, one in enumerate(order) if not finite.get(one, True)), default=_NOTHING)),
    )
    seen = [dict(zip(_COLUMNS, map(int, row), strict=True)) for row in ranks.gather(mine).tolist()]
    names = {"parameter": order, "column": columns, "given": inners, "outcome": inners, "gradient": order}
    places = [
        (
            _COLUMNS.index(what) if what in ("parameter", "column") else len(_COLUMNS),
            row["stage"],
            what,
            row[what],
            rank,
        )
        for row, rank in zip(seen, ranks.numbers, strict=True)
        for what in ("parameter", "column", "outcome", "given")
        if 0 <= row[what] < len(names[what])
    ]
    if places:
        *_, what, number, rank = min(places, key=lambda one: (one[0], one[1], one[2] == "given"))
        return NonFiniteCause(what, names[what][number], rank)
    turned = [(row["gradient"], rank in ranks.bad, -rank) for row, rank in zip(seen, ranks.numbers, strict=True)]
    number, _, rank = max(turned)
    return NonFiniteCause("gradient", order[number], -rank) if 0 <= number < len(order) else NonFiniteCause()


def _is_finite(leaves: Sequence[Any]) -> bool:
    return not any(isinstance(x, Tensor) and _is_bad(x) for x in leaves)


def _is_bad(tensor: Tensor) -> bool:
    """Return whether a tensor has a nan or +inf; attention masks contain -inf."""
    if isinstance(tensor, AbsentTensor) or tensor.layout is not torch.strided:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return bool((plain.isnan() | plain.isposinf()).any())
