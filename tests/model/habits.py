"""What forwards keep beside their parameters: each module here differs if somebody runs it once more than training."""

from __future__ import annotations

import collections
import contextvars
import io
import itertools
import random
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RANDOM = np.random.default_rng(5)
DICE = random.Random(5)
CALLS = 0
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
UNSET: contextvars.ContextVar[int] = contextvars.ContextVar("unset")  # without a value
THREAD = threading.local()
BY_MODULE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
STATE: dict[str, Any] = {"calls": 0}


class Net(nn.Module):
    """An embedding, a mixing layer and a head; a habit gives a factor and keeps what it likes."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def factor(self, x: Tensor) -> Any:
        return 1.0

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + torch.tanh(self.mix(x)) * self.factor(x))


class Counter(Net):
    calls = 0

    def factor(self, x: Tensor) -> Any:
        self.calls += 1
        return 1 / self.calls


class OfTheClass(Net):
    made = 0

    def factor(self, x: Tensor) -> Any:
        type(self).made += 1
        return 1 / type(self).made


class Global(Net):
    def factor(self, x: Tensor) -> Any:
        global CALLS
        CALLS += 1
        STATE["calls"] += 1
        return 1 / (CALLS + STATE["calls"])


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def factor(self, x: Tensor) -> Any:
        return 1 / self.count()


class Held(Net):
    """In lists, objects and iterators."""

    def __init__(self) -> None:
        super().__init__()
        self.history, self.numbers, self.box = [1.0], itertools.count(1), SimpleNamespace(inner={"sum": 0.0})
        self.rows = np.ones(3)

    def factor(self, x: Tensor) -> Any:
        self.history.append(float(x.detach().mean()))
        self.box.inner["sum"] += 1
        self.rows *= 1.1
        return len(self.history) / (self.box.inner["sum"] + next(self.numbers)) * float(self.rows.sum())


class ActNorm(Net):
    """A flag in a buffer; a parameter written at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(8))

    def factor(self, x: Tensor) -> Any:
        if not self.ready:
            self.scale.data.copy_(0.5 / (x.detach().std((0, 1)) + 1e-3))
            self.ready.fill_(1)
        return self.scale


class Written(Net):
    """A parameter that every forward moves, and a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def factor(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.slow.mul_(0.9)
        self.steps = self.steps + 1
        return self.slow * (1 + self.steps)


class Running(Net):
    mean = 0.0

    def factor(self, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * float(x.detach().abs().mean())
        return 1 + self.mean


class Last(Net):
    """What the batch before has left."""

    state: Any = None

    def factor(self, x: Tensor) -> Any:
        before, self.state = self.state, x.mean((0, 1))
        return 1.0 if before is None else 1 + before.detach()


class Drawing(Net):
    """Generators of its own, of its module, and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.numpys = torch.Generator().manual_seed(3), np.random.default_rng(3)

    def factor(self, x: Tensor) -> Any:
        drawn = float(torch.rand((), generator=self.torchs)) + self.numpys.random() + RANDOM.random() + DICE.random()
        return 1 + drawn


class Penalty(Net):
    """Takes a gradient within its forward."""

    def factor(self, x: Tensor) -> Any:
        y = torch.tanh(self.mix(x))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=self.training)
        return 1 + gradient.square().mean()


class Modes(Net):
    """Evaluates a part of itself, and says so; hooks what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def factor(self, x: Tensor) -> Any:
        self.drop.eval()
        self.hooks = getattr(self, "hooks", 0) + 1
        self.mix.register_forward_hook(lambda module, given, out: out * 0.99)
        return self.drop(x)


class OfTheContext(Net):
    """A context variable, what lies in a thread, by module in a weak dictionary; text, bytes, a dict of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.bytes, self.user = io.StringIO(), bytearray(b"x"), collections.UserDict(calls=0)

    def factor(self, x: Tensor) -> Any:
        VARIABLE.set(VARIABLE.get() + 1)
        UNSET.set(UNSET.get(0) + 1)
        THREAD.calls = getattr(THREAD, "calls", 0) + 1
        BY_MODULE[self.mix] = BY_MODULE.get(self.mix, 0) + 1
        self.text.write("x")
        self.bytes.append(1)
        self.user["calls"] += 1
        length = len(self.text.getvalue()) * len(self.bytes) + 0.1 * self.user["calls"]
        return 1 / (VARIABLE.get() + UNSET.get() + 2 * THREAD.calls + 3 * BY_MODULE[self.mix] + 0.1 * length)


HABITS = (
    OfTheContext,
    Counter,
    OfTheClass,
    Global,
    Closure,
    Held,
    ActNorm,
    Written,
    Running,
    Last,
    Drawing,
    Penalty,
    Modes,
)


def begin(kind: type[Net]) -> Net:
    """A new one, and all that it shares with others as at the start."""
    global CALLS
    CALLS, STATE["calls"] = 0, 0
    VARIABLE.set(0)
    globals()["UNSET"] = contextvars.ContextVar("unset")
    THREAD.calls = 0
    BY_MODULE.clear()
    if kind is OfTheClass:
        OfTheClass.made = 0
    RANDOM.bit_generator.state = np.random.default_rng(5).bit_generator.state
    DICE.seed(5)
    torch.manual_seed(0)
    return kind()
