"""One process of a trial: it runs a loop, and says what came of it."""

from __future__ import annotations

import dataclasses
import io
import logging
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from loops import scene
from loops.habit import Habit

TIMEOUT_S = 15.0  # of wrap, where a habit says nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a loop ended: "returned", "refused" (an error of ours), "crash" (any other), or "hang".

    state: what the loop returned, or the parameters at the end it came to. moved: whether these parameters are other
    than when wrap returned. history: of plain torch, the parameters at first and after every step. notes: warnings and
    the log.
    """

    ending: str
    said: str = ""
    state: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    moved: bool = False
    history: tuple[Mapping[str, Tensor], ...] = ()
    notes: str = ""

    def packed(self) -> bytes:
        held = io.BytesIO()
        torch.save({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, held)
        return held.getvalue()


def unpacked(held: bytes) -> Outcome:
    return Outcome(**torch.load(io.BytesIO(held), weights_only=False))


def run(habit: Habit, dtype: torch.dtype, steps: int, *, is_plain: bool) -> Outcome:
    """The habit's loop, with `wrap` as the identity (`is_plain`), or with gossamer's."""
    torch.set_default_dtype(dtype)
    scene.set_steps(steps)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    seen = Watched()
    log = io.StringIO()
    logging.getLogger("gossamer").addHandler(logging.StreamHandler(log))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        end = _ended(habit, seen, is_plain)
    notes = log.getvalue() + "".join(f"{w.message}\n" for w in warned)
    return dataclasses.replace(end, notes=notes)


def _ended(habit: Habit, seen: Watched, is_plain: bool) -> Outcome:
    loop = (habit.like or habit.loop) if is_plain else habit.loop
    try:
        with seen.every_step(all_kept=is_plain):
            returned = loop(seen.plain if is_plain else seen.wrapped)
    except Exception as error:
        is_ours = type(error).__module__.split(".")[0] == "gossamer"
        said = f"{type(error).__name__}: {error}" if is_ours else traceback.format_exc()
        now = seen.history[-1] if habit.sets and seen.history else seen.parameters()
        return Outcome(ending="refused" if is_ours else "crash", said=said, state=now, moved=seen.has_moved(now))
    return Outcome(ending="returned", state=dict(tensors("", returned)), history=tuple(seen.history))


class Watched:
    """The models given to wrap, and where their parameters were."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.history: list[Mapping[str, Tensor]] = []
        self._first: Mapping[str, Tensor] = {}

    def plain(self, model: Any, optimizer: Any, loader: Any = None, **_: Any) -> Any:
        self._add(model)
        return model, optimizer, loader

    def wrapped(self, model: Any, optimizer: Any, loader: Any = None, **settings: Any) -> Any:
        import gossamer

        self._add(model)
        three = gossamer.wrap(model, optimizer, loader, **{"timeout_s": TIMEOUT_S, **settings})
        self._first = self.history[-1] = self.parameters()
        return three

    def _add(self, model: Any) -> None:
        self.models += model if isinstance(model, (list, tuple)) else [model]
        self._first = self.parameters()
        self.history.append(self._first)

    def parameters(self) -> Mapping[str, Tensor]:
        return {
            f"{index}.{name}": param.detach().clone()
            for index, model in enumerate(self.models)
            for name, param in model.named_parameters()
            if not isinstance(param, nn.UninitializedParameter)
        }

    def has_moved(self, now: Mapping[str, Tensor]) -> bool:
        return any(name in now and not torch.equal(first, now[name]) for name, first in self._first.items())

    @contextmanager
    def every_step(self, *, all_kept: bool) -> Iterator[None]:
        """Keeps the parameters after each step of any optimizer, or after the last one."""

        def keep(*_: Any) -> None:
            if not all_kept:
                self.history.clear()
            self.history.append(self.parameters())

        hook = register_optimizer_step_post_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def tensors(name: str, held: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in what a loop returned, under a name."""
    if isinstance(held, nn.Module):
        yield from ((f"{name}{key}", value.detach().clone()) for key, value in held.state_dict().items())
    elif isinstance(held, Tensor):
        yield name, held.detach().clone()
    elif isinstance(held, (bool, int, float)):
        yield name, torch.tensor(held)
    elif isinstance(held, Mapping):
        for key, value in held.items():
            yield from tensors(f"{name}{key}.", value)
    else:
        for index, value in enumerate(held):
            yield from tensors(f"{name}{index}.", value)
