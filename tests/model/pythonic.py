"""Modules whose blocks give and change Python values: of many kinds, none of which knows that it will be cut."""

from __future__ import annotations

import collections
import contextvars
import io
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.kept import WIDTH, Block, Net

SEEN: dict[str, Any] = {}
CALLS = 0
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
THREAD = threading.local()
BY_MODULE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
TEXT = io.StringIO()


def net(
    block: Callable[..., Any] | None = None,
    between: Callable[[Any, int, Any], Any] | None = None,
    forward: Callable[[Any, Tensor], Tensor] | None = None,
    **attributes: Any,
) -> Callable[[], nn.Module]:
    """A network with other blocks, or another way between them."""
    inner = {"forward": block, **attributes} if block is not None else dict(attributes)
    kind = type("Other", (Block,), inner)
    outer: dict[str, Any] = {"block": kind}
    if between is not None:
        outer["between"] = between
    if forward is not None:
        outer["forward"] = forward
    return type("Another", (Net,), outer)


def mixed(block: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(block.mix(x))


def counter(block: Any, x: Tensor) -> Any:
    block.n += 1
    return mixed(block, x), block.n


def dice(block: Any, x: Tensor) -> Any:
    return mixed(block, x), random.random() + np.random.rand()


def is_positive(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, bool(y.mean() > 0)


def word(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, "up" if float(y.sum()) > 0 else "down"


def by_numpy(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, float(y.detach().mean(0).numpy().mean())


def by_list(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, sum(y.detach().mean(0).tolist())


def how_many(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, (y > 0).nonzero().shape[0]


def item(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, {"mean": y.mean().item(), "where": int(y[0].argmax())}


def scaled(module: Any, i: int, got: Any) -> Any:
    return got[0] * (1 + 0.1 * got[1])


def by_word(module: Any, i: int, got: Any) -> Any:
    return got[0] * (1.2 if got[1] == "up" else 0.7)


def perhaps(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, y.mean(1, keepdim=True) if y.mean() < 0.1 else None


def perhaps_by_count(block: Any, x: Tensor) -> Any:
    y, block.n = mixed(block, x), block.n + 1
    return y, y.mean(1, keepdim=True) if block.n % 2 else None


def with_perhaps(module: Any, i: int, got: Any) -> Any:
    return got[0] if got[1] is None else got[0] + got[1]


@dataclass
class Context:
    """What is handed from block to block."""

    depth: int = 0
    gains: Any = None
    log: Any = None


def with_context(make: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, x: Tensor) -> Tensor:
        context = make()
        x = module.inlet(x)
        for block in module.blocks:
            x = block(x, context)
        return module.outlet(x * (1 + 0.1 * getattr(context, "depth", 0)))

    return forward


def deepens(block: Any, x: Tensor, context: Any) -> Tensor:
    context.depth += 1
    return mixed(block, x) * (1 + 0.1 * context.depth)


def in_a_set(block: Any, x: Tensor, context: Any) -> Tensor:
    context.add(len(context))
    return mixed(block, x) * (1 + 0.1 * len(context))


def next_of(block: Any, x: Tensor, context: Any) -> Tensor:
    return mixed(block, x) * next(context)


def pops(block: Any, x: Tensor, context: Any) -> Tensor:
    return mixed(block, x) * context.pop()


def called_back(block: Any, x: Tensor, context: Any) -> Tensor:
    y = mixed(block, x)
    context(0.5)
    return y


def put(block: Any, x: Tensor, context: Any) -> Tensor:
    context["depth"] = context.get("depth", 0) + 1
    return mixed(block, x) * context["depth"]


def appended(block: Any, x: Tensor, context: Any) -> Tensor:
    context.append(len(context) + 1.5)
    return mixed(block, x) * context[-1]


def norms(block: Any, x: Tensor, context: Any) -> Tensor:
    y = mixed(block, x)
    context.append(float(y.detach().norm()))
    return y


def with_list(module: Any, x: Tensor) -> Tensor:
    context: list[Any] = []
    x = module.inlet(x)
    for block in module.blocks:
        x = block(x, context)
    return module.outlet(x * (1 + 0.01 * sum(context)))


def with_text(module: Any, x: Tensor) -> Tensor:
    text = io.StringIO()
    x = module.inlet(x)
    for block in module.blocks:
        x = block(x, text)
    return module.outlet(x * text.getvalue().count("one"))


def with_callback(module: Any, x: Tensor) -> Tensor:
    seen: list[float] = []
    x = module.inlet(x)
    for block in module.blocks:
        x = block(x, seen.append)
    return module.outlet(x * (1 + sum(seen)))


def skips(block: Any, x: Tensor, context: Any) -> Tensor:
    """Half of the blocks push, the others pop."""
    if block.pushes:
        context.append(x)
        return mixed(block, x)
    return mixed(block, x) + context.pop()


class Skips(Net):
    block = type("Skipping", (Block,), {"forward": skips})

    def forward(self, x: Tensor) -> Tensor:
        context: list[Tensor] = []
        x = self.inlet(x)
        for i, block in enumerate(self.blocks):
            block.pushes = i < 2
            x = block(x, context)
        return self.outlet(x)


def globally(block: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    return mixed(block, x)


def with_global(module: Any, i: int, got: Any) -> Any:
    return got * (1 + 0.05 * (CALLS % 7) + 0.03 * (SEEN["calls"] % 5))


def elsewhere(block: Any, x: Tensor) -> Tensor:
    """Counts in the context, in the thread, by module, and in a text."""
    VARIABLE.set(VARIABLE.get() + 1)
    THREAD.calls += 1
    BY_MODULE[block] = BY_MODULE.get(block, 0) + 1
    TEXT.write("one")
    return mixed(block, x)


def with_elsewhere(module: Any, x: Tensor) -> Tensor:
    VARIABLE.set(1)
    THREAD.calls = 2
    BY_MODULE.clear()
    TEXT.truncate(0)
    x = module.inlet(x)
    for block in module.blocks:
        x = block(x) * (1 + 0.1 * VARIABLE.get() + 0.2 * THREAD.calls + 0.3 * len(BY_MODULE))
    return module.outlet(x * TEXT.getvalue().count("one"))


def written(block: Any, x: Tensor, text: Any) -> Tensor:
    text.write("one")
    return mixed(block, x)


class Counted(Block):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return mixed(self, x)


def own_state_read(module: Any, i: int, got: Any) -> Any:
    return got * (1 + 0.1 * module.blocks[i].n)


class Neighbor(Block):
    """Reads what the block before has counted."""

    n, before = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return mixed(self, x) * (1 + 0.2 * (self.before[0].n if self.before else 0))


class Neighbors(Net):
    block = Neighbor

    def __init__(self) -> None:
        super().__init__()
        for before, block in zip(self.blocks[:-1], self.blocks[1:], strict=True):
            block.before = (before,)


class Shared(Net):
    """One block, called four times, which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Neighbor()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for _ in range(4):
            x = self.blocks[0](x) * (1 + 0.1 * self.blocks[0].n)
        return self.outlet(x)


class Scale(Block):
    """Keeps a number that its model reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = mixed(self, x)
        self.scale = float(y.detach().abs().mean())
        return y


class OwnMean(Block):
    """A running mean of its own, in Python, that nobody else reads."""

    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = mixed(self, x)
        self.mean = 0.9 * self.mean + 0.1 * float(y.detach().abs().mean())
        return y * (1 + self.mean)


class Recurrent(Block):
    """A recurrent layer, and how often it was called."""

    n = 0

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        self.n += 1
        return x + self.mix(x[:, None])[0][:, 0], self.n


def of_class(name: str, kind: type[nn.Module], between: Any = None) -> Callable[[], nn.Module]:
    return type(name, (Net,), {"block": kind, **({"between": between} if between else {})})


def generated(values: list[float]) -> Iterator[float]:
    yield from values


GAINS = [1.0, 1.2, 0.8, 1.5]


def skips_by_chance(block: Any, x: Tensor) -> Tensor:
    return x if random.random() < 0.5 else mixed(block, x)


def skips_later(block: Any, x: Tensor) -> Tensor:
    block.n = getattr(block, "n", 0) + 1
    return mixed(block, x) if block.n <= 2 else x


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "skips by chance": net(skips_by_chance),
    "skips later": net(skips_later),
    "counter": net(counter, scaled, n=0),
    "dice": net(dice, scaled),
    "recurrent": of_class("Recurrent", Recurrent, scaled),
    "is_positive": net(is_positive, lambda m, i, got: got[0] * (1.2 if got[1] else 0.8)),
    "word": net(word, by_word),
    "numpy": net(by_numpy, scaled),
    "list": net(by_list, scaled),
    "how_many": net(how_many, scaled),
    "item": net(item, lambda m, i, got: got[0] * (1 + got[1]["mean"]) + 0.1 * got[1]["where"]),
    "perhaps": net(perhaps, with_perhaps),
    "perhaps_by_count": net(perhaps_by_count, with_perhaps, n=0),
    "deepens": net(deepens, forward=with_context(Context)),
    "in_a_set": net(in_a_set, forward=with_context(set)),
    "next_of_a_list": net(next_of, forward=with_context(lambda: iter(GAINS))),
    "next_of_a_generator": net(next_of, forward=with_context(lambda: generated(GAINS))),
    "pops": net(pops, forward=with_context(lambda: list(GAINS))),
    "pops_of_a_deque": net(pops, forward=with_context(lambda: collections.deque(GAINS))),
    "put": net(put, forward=with_context(dict)),
    "appended": net(appended, forward=with_list),
    "norms": net(norms, forward=with_list),
    "called_back": net(called_back, forward=with_callback),
    "skips": Skips,
    "own_state_read": of_class("Reading", Counted, own_state_read),
    "neighbors": Neighbors,
    "shared": Shared,
    "elsewhere": net(elsewhere, forward=with_elsewhere),
    "text": net(written, forward=with_text),
    "scale_kept": of_class("Scaled", Scale, lambda m, i, got: got * (1 + m.blocks[i].scale)),
    "own_mean": of_class("Mean", OwnMean),
}


def detached(block: Any, x: Tensor) -> Tensor:
    block.n += 1
    y = mixed(block, x)
    return y.detach() if block.n <= 2 else y


def grows(block: Any, x: Tensor) -> Any:
    block.n += 1
    y = mixed(block, x)
    return (y,) * (3 if block.n > 2 else 2)


def passes(block: Any, x: Tensor) -> Any:
    block.n += 1
    return x if block.n <= 2 else mixed(block, x)


def becomes(block: Any, x: Tensor) -> Any:
    block.n += 1
    y = mixed(block, x)
    return y, (None if block.n <= 2 else y.mean(1, keepdim=True))


def wider(block: Any, x: Tensor) -> Any:
    block.n += 1
    y = mixed(block, x)
    return y if block.n <= 2 else y.double()


def tells_too_much(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, float(y.detach().repeat(40, 40).numpy().mean())


def later_tells(block: Any, x: Tensor) -> Tensor:
    block.n += 1
    if block.n > 2:
        block.gain = 1.0 + 0.1 * block.n
    return mixed(block, x)


def later_in_a_list(block: Any, x: Tensor, context: Any) -> Tensor:
    block.n += 1
    if block.n > 2:
        context.append(0.5)
    return mixed(block, x)


def later_kept(block: Any, x: Tensor) -> Tensor:
    block.n += 1
    y = mixed(block, x)
    block.last = y.mean() if block.n > 2 else None
    return y


def later_own(block: Any, x: Tensor) -> Tensor:
    """What nobody else reads."""
    block.n += 1
    if block.n > 2:
        block.gain = 1.5
    return mixed(block, x) * getattr(block, "gain", 1.0)


EQUAL["later_own"] = net(later_own, n=0)
EQUAL["passes_at_first"] = net(passes, n=0)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "detached_at_first": (net(detached, n=0), r"blocks\.\d to produce a tensor without a gradient .*stage \d"),
    "grows": (
        net(grows, lambda m, i, got: got[-1], n=0),
        r"blocks\.\d to produce 2 tensors and values .*got 3 tensors",
    ),
    "becomes_a_tensor": (net(becomes, with_perhaps, n=0), r"blocks\.\d.*"),
    "wider": (
        net(wider, lambda m, i, got: got.float(), n=0),
        r"blocks\.\d to produce a tensor of torch\.float32 .*got torch\.float64",
    ),
    "later_tells": (
        net(later_tells, lambda m, i, got: got * getattr(m.blocks[i], "gain", 1.0), n=0),
        r"blocks\.\d to change the same Python state.*got a change of blocks\.\d\.gain",
    ),
    "later_in_a_list": (net(later_in_a_list, forward=with_list, n=0), r"blocks\.\d to change.*argument 1 \(a list\)"),
    "later_kept": (
        net(later_kept, lambda m, i, got: got if m.blocks[i].last is None else got + m.blocks[i].last, n=0, last=None),
        r"blocks\.\d",
    ),
    "tells_too_much": (
        net(tells_too_much, scaled),
        r"blocks\.\d to read at most 2044 bytes of tensor values.*got \d+ bytes",
    ),
}
