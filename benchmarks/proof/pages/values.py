"""Python values that leave blocks: numbers, words, flags, None, functions."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import Block, Net


class Scaled(Net):
    """Blocks return (x, number)."""

    def between(self, number, x):
        return x[0] * (1 + 0.05 * x[1])


class Counted(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), self.n


@habit(EQUAL, hard=True)
def counter_returned():
    """A block returns how often it was called, and the model scales with it."""
    return Scaled(Counted)


class Chance(Block):
    def forward(self, x):
        return super().forward(x), random.random()


@habit(EQUAL, hard=True, draws=True)
def random_returned():
    """A block returns what Python's random gave."""
    return Scaled(Chance)


class Mean(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, float(y.detach().numpy().mean())


@habit(OR_REFUSED, hard=True)
def numpy_mean_returned():
    """A block returns the mean of what it gives, made by numpy."""
    return Scaled(Mean)


class Listed(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().mean((0, 1)).tolist()[0]


@habit(OR_REFUSED, hard=True)
def tolist_returned():
    """A block returns a number out of tolist()."""
    return Scaled(Listed)


class Items(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.std().item()


@habit(OR_REFUSED)
def item_returned():
    """A block returns item()."""
    return Scaled(Items)


class Flagged(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, bool(y.mean() > 0.05)


@habit(OR_REFUSED, hard=True)
def bool_returned():
    """A block returns whether its mean is large."""
    return Scaled(Flagged)


class Worded(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, "up" if y.sum() > 0 else "down"


class Reads(Net):
    def between(self, number, x):
        return x[0] * {"up": 1.1, "down": 0.9}[x[1]]


@habit(OR_REFUSED, hard=True)
def word_returned():
    """A block returns a word that numbers choose."""
    return Reads(Worded)


class Found(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, (y > 0.5).nonzero().shape[0] / y.numel()


@habit(OR_REFUSED, hard=True)
def count_of_nonzero_returned():
    """A block returns how many entries are large, by a shape."""
    return Scaled(Found)


class Maybe(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.mean(1, keepdim=True) if y.mean() > 0 else None


class Adds(Net):
    def between(self, number, x):
        return x[0] if x[1] is None else x[0] + 0.3 * x[1]


@habit(OR_REFUSED, hard=True)
def none_or_tensor_by_numbers():
    """An optional output, there when the mean is positive."""
    return Adds(Maybe)


class Sometimes(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return y, y.mean(1, keepdim=True) if self.n > 6 else None


@habit(OR_REFUSED, hard=True, late=True)
def tensor_from_the_seventh_call_on():
    """An optional output that is None during a warm-up."""
    return Adds(Sometimes)


class AtFirst(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return y, None if self.n > 6 else y.mean(1, keepdim=True)


@habit(OR_REFUSED, hard=True, late=True)
def no_tensor_from_the_seventh_call_on():
    """An optional output that ends after a warm-up."""
    return Adds(AtFirst)


@dataclass
class Output:
    hidden: Tensor
    calls: int
    note: str = "ok"
    extra: Tensor | None = None


class Classed(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return Output(hidden=y, calls=self.n, extra=y.amax(1, keepdim=True))


class ReadsClass(Net):
    def between(self, number, x):
        return x.hidden * (1 + 0.03 * x.calls) + 0.1 * x.extra


@habit(EQUAL, hard=True)
def dataclass_with_a_counter():
    """A dataclass of tensors, a number that changes, a word and an optional."""
    return ReadsClass(Classed)


class Pair(NamedTuple):
    hidden: Tensor
    step: int


class Named(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return Pair(super().forward(x), self.n // 4)


class ReadsPair(Net):
    def between(self, number, x):
        return x.hidden / (1 + 0.2 * x.step)


@habit(EQUAL, hard=True, late=True)
def named_tuple_with_the_step():
    """A named tuple with a number that is 0 in the first micro-batches and grows with the steps."""
    return ReadsPair(Named)


class Stats(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return {"hidden": super().forward(x), "stats": {"calls": self.n, "seen": [self.n, x.shape[0] * self.n]}}


class ReadsStats(Net):
    def between(self, number, x):
        return x["hidden"] * (1 + 0.01 * x["stats"]["seen"][1])


@habit(EQUAL, hard=True)
def nested_statistics():
    """Numbers in a list in a dict in a dict."""
    return ReadsStats(Stats)


class Mode(enum.Enum):
    WARM = 1
    FULL = 2


class Moded(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), Mode.WARM if self.n <= 5 else Mode.FULL


class ReadsMode(Net):
    def between(self, number, x):
        return x[0] * (0.8 if x[1] is Mode.WARM else 1.1)


@habit(OR_REFUSED, hard=True, late=True)
def enum_that_changes():
    """A member of an enum, another one after some calls."""
    return ReadsMode(Moded)


class Many(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return [y.roll(k, 1) for k in range(1 + self.n // 5)]


class Sums(Net):
    def between(self, number, x):
        return sum(x) / len(x)


@habit(OR_REFUSED, hard=True, late=True)
def list_that_grows():
    """A list of tensors that becomes longer in the second step."""
    return Sums(Many)


class Chosen(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, int(y.mean((0, 1)).argmax())


class Picks(Net):
    def between(self, number, x):
        return x[0] + 0.2 * x[0][..., x[1] : x[1] + 1]


@habit(OR_REFUSED, hard=True)
def channel_returned():
    """A block returns which channel is the largest; the model reads that one."""
    return Picks(Chosen)


class Sliced(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), slice(0, 4 + self.n % 3)


class Cuts(Net):
    def between(self, number, x):
        return x[0] + 0.1 * x[0][..., x[1]].mean(-1, keepdim=True)


@habit(OR_REFUSED, hard=True)
def slice_returned():
    """A block returns a slice, another one in every call."""
    return Cuts(Sliced)


class Promise(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        times = 1 + 0.02 * self.n
        return super().forward(x), lambda y: y * times


class Calls(Net):
    def between(self, number, x):
        return x[1](x[0])


@habit(OR_REFUSED, hard=True)
def function_returned():
    """A block returns a closure that its caller applies."""
    return Calls(Promise)


class Stops(Net):
    """Early exit: a block says whether it is sure enough, and the rest is left out."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x, sure = block(x)
            if sure:
                break
        return self.head(x)


class Sure(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, bool(y.detach().abs().mean() > 1.05)


@habit(OR_REFUSED, hard=True)
def early_exit():
    """The model leaves the rest out when a block says so."""
    return Stops(Sure)


class SureLater(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), self.n > 9 and self.n % 2 == 0


@habit(OR_REFUSED, hard=True, late=True)
def early_exit_in_the_third_step():
    """The same by a counter of the block, from the third step on."""
    return Stops(SureLater)


class Router(Block):
    """Says which block is to run next."""

    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x), 1 + self.n % 2


class Routed(Net):
    def forward(self, input_ids):
        x, go = self.embed(input_ids), 0
        x, step = self.blocks[0](x)
        for number in (1, 2, 3):
            y, go = self.blocks[number](x)
            x = y * go + 0.1 * step * x
        return self.head(x)


@habit(EQUAL, hard=True)
def numbers_read_far_behind():
    """A number of the first block is read behind all others."""
    return Routed(Router)


class Nothing(Block):
    """Changes the tensor that it is given, and returns None."""

    def forward(self, x):
        x.add_(torch.tanh(self.mix(x.clone())))


class InPlace(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids) * 1.0
        for block in self.blocks:
            block(x)
        return self.head(x)


@habit(OR_REFUSED)
def none_returned():
    """Blocks change what they are given in place, and return nothing."""
    return InPlace(Nothing)


class Yields(Block):
    def forward(self, x):
        y = super().forward(x)
        yield y
        yield y.mean(1, keepdim=True)


class Consumes(Net):
    def between(self, number, x):
        y, mean = x
        return y + 0.1 * mean


@habit(OR_REFUSED, hard=True)
def generator_returned():
    """A block's forward is a generator, which the model's code consumes."""
    return Consumes(Yields)


class Temperature(Block):
    warm = 1.0

    def forward(self, x):
        self.warm = max(0.5, self.warm * 0.95)
        return super().forward(x), self.warm


class Tempered(Net):
    def between(self, number, x):
        return x[0] / x[1]


@habit(EQUAL, hard=True)
def temperature_returned():
    """A block anneals a temperature and returns it."""
    return Tempered(Temperature)


class Lengths(Block):
    def forward(self, x):
        return super().forward(x), x.shape[1], x.dtype, tuple(x.shape), str(x.device)


class ReadsLengths(Net):
    def between(self, number, x):
        assert x[4] == "cpu" and x[2] is torch.float32
        return x[0] / x[1] * x[3][1]


@habit(EQUAL)
def shapes_and_types_returned():
    """Values that are the same every time."""
    return ReadsLengths(Lengths)


class Sparse(Block):
    """Returns the names of what it did, as a set that depends on the call."""

    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        did = {"mixed"}
        if self.n % 3 == 0:
            y, did = y * 0.9, did | {"damped"}
        return y, did


class ReadsSets(Net):
    def between(self, number, x):
        return x[0] * (1.05 if "damped" in x[1] else 1.0)


@habit(OR_REFUSED, hard=True)
def set_of_words_returned():
    """A set of words, another one in every third call."""
    return ReadsSets(Sparse)


class Both(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return (y, y.mean(1, keepdim=True)) if self.n > 5 else y


class Either(Net):
    def between(self, number, x):
        return x[0] + 0.2 * x[1] if isinstance(x, tuple) else x


@habit(OR_REFUSED, hard=True, late=True)
def tensor_then_a_pair():
    """A tensor at first, a pair of tensors from the second step on."""
    return Either(Both)


class Loss(Block):
    """Returns a weight for its auxiliary loss, that falls from call to call."""

    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return y, {"aux": y.square().mean(), "weight": 0.1 / self.n}


class Weighted(Net):
    def forward(self, input_ids, labels):
        x, total = self.embed(input_ids), 0.0
        for block in self.blocks:
            x, side = block(x)
            total = total + side["weight"] * side["aux"]
        logits = self.head(x)
        own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + total, "logits": logits}


@habit(EQUAL, hard=True)
def weight_of_a_loss_returned():
    """A falling weight beside the tensor it is for."""
    return Weighted(Loss)
