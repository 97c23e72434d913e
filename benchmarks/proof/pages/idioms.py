"""Idioms of Python around blocks: properties, partials, delegation, contexts, caches, weak references, generators."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
import time
import weakref
from collections import ChainMap, deque, namedtuple
from dataclasses import dataclass, fields
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import DEPTH, VOCABULARY, WIDTH, Block, Net


class TiedByProperty(Net):
    """The head's weight is a property that gives the embedding's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    @property
    def unembedding(self):
        return self.embed.weight

    def forward(self, input_ids):
        return F.linear(super().forward(input_ids), self.unembedding, self.bias)


@habit(EQUAL)
def head_tied_by_a_property():
    """No head: a property gives the embedding's weight."""
    return TiedByProperty()


class Delegates(nn.Module):
    """A wrapper whose __getattr__ asks what it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) * self.gain


class Gained(Block):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.9))


@habit(EQUAL)
def attributes_delegated():
    """Blocks in wrappers that find attributes in what they wrap."""
    return Net(lambda: Delegates(Gained()))


class Lowered(Block):
    """A property with a setter that keeps a history, and a cached property of shapes."""

    def __init__(self):
        super().__init__()
        self._heat, self._set = 1.0, 0

    @property
    def heat(self):
        return self._heat

    @heat.setter
    def heat(self, value):
        self._set += 1
        self._heat = min(1.0, value) / (1 + 0.001 * self._set)

    @functools.cached_property
    def scale(self):
        return self.mix.in_features**-0.5 * 4

    def forward(self, x):
        return super().forward(x) * self.heat * self.scale


class SetsHeat(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            block.heat = block.heat * (0.99 - 0.005 * number)
            x = block(x)
        return self.head(x)


@habit(EQUAL)
def property_with_a_setter():
    """The model sets a property of every block, whose setter counts."""
    return SetsHeat(Lowered)


class Partials(Net):
    """Blocks behind functools.partial and operator.attrgetter, composed by reduce."""

    def __init__(self):
        super().__init__()
        self.ways = [functools.partial(self.through, number, gain=1 - 0.05 * number) for number in range(DEPTH)]

    def through(self, number, x, *, gain):
        return operator.itemgetter(number)(self.blocks)(x) * gain

    def forward(self, input_ids):
        return self.head(functools.reduce(lambda x, way: way(x), self.ways, self.embed(input_ids)))


@habit(EQUAL)
def partials_of_a_method():
    """A list of partials made by the constructor, composed."""
    return Partials()


DEPTH_OF_CALL: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


@contextlib.contextmanager
def deeper():
    token = DEPTH_OF_CALL.set(DEPTH_OF_CALL.get() + 1)
    try:
        yield DEPTH_OF_CALL.get()
    finally:
        DEPTH_OF_CALL.reset(token)


class AsksDepth(Block):
    def forward(self, x):
        with deeper() as inner:
            return super().forward(x) * (1 - 0.02 * inner * DEPTH_OF_CALL.get())


class GoesDeeper(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(deeper())
                x = block(x)
        return self.head(x)


@habit(EQUAL)
def depth_in_a_context_variable():
    """A context variable that the model raises before every block, and blocks raise once more."""
    return GoesDeeper(AsksDepth)


class Parent(Net):
    """Blocks know their model by a weak reference, and read its step."""

    def __init__(self):
        super().__init__(Child)
        self.step = 0
        for block in self.blocks:
            block.parent = weakref.ref(self)

    def forward(self, input_ids):
        self.step += self.training
        return super().forward(input_ids)


class Child(Block):
    def forward(self, x):
        return super().forward(x) * (1 - 0.01 * self.parent().step)


@habit(EQUAL)
def step_of_the_parent():
    """Blocks read the model's counter through a weak reference."""
    return Parent()


class Layer(Enum):
    PLAIN = "plain"
    GATED = "gated"


class Kinds(Block):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        match self.kind:
            case Layer.PLAIN:
                return super().forward(x) + 0.0 * self.gate(x)
            case Layer.GATED:
                return super().forward(x) * self.gate(x).sigmoid()


@habit(EQUAL)
def kinds_by_match():
    """Blocks of two kinds by an enum and a match statement."""
    kinds = itertools.cycle(Layer)
    return Net(lambda: Kinds(next(kinds)))


@dataclass
class Stream:
    """What goes from block to block."""

    x: Tensor
    skip: Tensor | None = None
    depth: int = 0
    notes: tuple[str, ...] = ()

    def map(self, f):
        return Stream(f(self.x), self.skip, self.depth + 1, (*self.notes, f"depth {self.depth}"))


class Streams(Block):
    def forward(self, stream):
        made = stream.map(super().forward)
        if made.depth == 2:
            made.skip = made.x
        return made


class StreamNet(Net):
    def forward(self, input_ids):
        stream = Stream(self.embed(input_ids))
        for block in self.blocks:
            stream = block(stream)
        assert len(stream.notes) == stream.depth == DEPTH and {f.name for f in fields(stream)} >= {"x"}
        return self.head(stream.x + 0.5 * stream.skip)


@habit(EQUAL)
def stream_object():
    """A dataclass with a method goes through blocks, one of which sets a skip."""
    return StreamNet(Streams)


Pair = namedtuple("Pair", "left right")


class Reversible(Block):
    """RevNet: two streams in a named tuple."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair):
        left = pair.left + torch.tanh(self.mix(pair.right))
        return pair._replace(left=left, right=pair.right + torch.tanh(self.other(left)))


class TwoStreams(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        pair = Pair(x, x.clone())
        for block in self.blocks:
            pair = block(pair)
        return self.head(sum(pair) / 2)


@habit(EQUAL)
def two_streams_in_a_named_tuple():
    """Reversible blocks, _replace of a named tuple, sum over it."""
    return TwoStreams(Reversible)


class Yields(Net):
    """The model's layers as a generator that is sent activations."""

    def layers(self):
        x = yield
        for block in self.blocks:
            x = yield block(x)

    def forward(self, input_ids):
        x, walk = self.embed(input_ids), self.layers()
        next(walk)
        for _ in self.blocks:
            x = walk.send(x)
        walk.close()
        return self.head(x)


@habit(EQUAL)
def layers_of_a_generator():
    """A generator that is sent what the last block gave."""
    return Yields()


class Options(Net):
    """Options in a ChainMap, of which a forward lays one on top and takes it away."""

    def __init__(self):
        super().__init__(Optional)
        self.options = ChainMap({"gain": 1.0, "power": 1})

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            self.options = self.options.new_child({"gain": 1 - 0.1 * number})
            x = block(x, **self.options)
        while len(self.options.maps) > 1:
            self.options = self.options.parents
        return self.head(x)


class Optional(Block):
    def forward(self, x, gain=1.0, power=1):
        return super().forward(x) * gain**power


@habit(EQUAL)
def options_in_a_chain_map():
    """A ChainMap that grows and shrinks within a forward."""
    return Options()


class Timed(Net):
    """Times of blocks, for a log, in a ring."""

    def __init__(self):
        super().__init__()
        self.times: deque[float] = deque(maxlen=8)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            began = time.perf_counter()
            x = block(x)
            self.times.append(time.perf_counter() - began)
        return self.head(x)


@habit(EQUAL)
def blocks_that_are_timed():
    """perf_counter around blocks, kept in a deque that nobody reads."""
    return Timed()


class TimesItself(Block):
    """A block that keeps how long it took."""

    def forward(self, x):
        began = time.perf_counter()
        y = super().forward(x)
        self.took = time.perf_counter() - began
        return y


@habit(EQUAL)
def blocks_that_time_themselves():
    """The same within blocks."""
    return Net(TimesItself)


class Registry(Net):
    """Layers by name in a dict of bound methods, asked by getattr with names made of strings."""

    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.add_module(f"layer_{number}", block)
        del self.blocks

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number in range(DEPTH):
            x = getattr(self, f"layer_{number}")(x)
        return self.head(x)


@habit(EQUAL)
def layers_by_getattr():
    """self.layer_0 ... by add_module and getattr, no list."""
    return Registry()


class Dynamic(Net):
    """A ModuleDict whose keys a plan in the constructor names, with the same block under two of its steps."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({f"b{i}": Block() for i in range(3)})
        self.plan = ["b0", "b1", "b0", "b2"]

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for step, name in enumerate(self.plan):
            x = self.blocks[name](x) if name in self.blocks else x
            x = x / (1 + 0.01 * step)
        return self.head(x)


@habit(OR_REFUSED)
def plan_of_names():
    """The order of calls is a list of keys, one of them twice."""
    return Dynamic()


def scaled(factor):
    def wrap(forward):
        @functools.wraps(forward)
        def run(self, *args, **kwargs):
            run.calls += 1
            return forward(self, *args, **kwargs) * factor

        run.calls = 0
        return run

    return wrap


class ScaledBlock(Block):
    @scaled(0.9)
    def forward(self, x):
        return x + torch.tanh(self.mix(x))


@habit(OR_REFUSED)
def decorator_that_counts():
    """A decorator on forward counts on the function; nobody reads it."""
    return Net(ScaledBlock)
