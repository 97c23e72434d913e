"""What blocks do to their arguments, to other objects and to globals."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import threading
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import DEPTH, WIDTH, Block, Net


class Given(Net):
    """Every block is given `self.made()`, anew in every forward."""

    def made(self):
        return SimpleNamespace(n=0)

    def forward(self, input_ids):
        x, given = self.embed(input_ids), self.made()
        for block in self.blocks:
            x = block(x, given)
        return self.head(self.end(x, given))

    def end(self, x, given):
        return x


class CountsObject(Block):
    def forward(self, x, state):
        state.n += 1
        return super().forward(x) * (1 + 0.1 * state.n)


@habit(EQUAL, hard=True)
def attribute_of_an_argument():
    """Blocks count up an attribute of an object that they are given."""
    return Given(CountsObject)


class AddsToSet(Block):
    def forward(self, x, seen):
        seen.add(len(seen) * 3)
        return super().forward(x) * (1 + 0.1 * len(seen))


class GivesSet(Given):
    def made(self):
        return set()


@habit(EQUAL, hard=True)
def set_of_an_argument():
    """Blocks add to a set that they are given."""
    return GivesSet(AddsToSet)


class TakesNext(Block):
    def forward(self, x, gains):
        return super().forward(x) * next(gains)


class GivesIterator(Given):
    def made(self):
        return iter([1.0, 1.2, 0.8, 1.1])


@habit(EQUAL, hard=True)
def next_of_an_iterator():
    """Every block takes its gain from an iterator that all are given."""
    return GivesIterator(TakesNext)


class GivesGenerator(Given):
    def made(self):
        return (0.8 + 0.1 * k for k in itertools.count())


@habit(OR_REFUSED, hard=True)
def next_of_a_generator():
    """The same from a generator expression."""
    return GivesGenerator(TakesNext)


class PopsNumber(Block):
    def forward(self, x, gains):
        return super().forward(x) * gains.pop()


class GivesNumbers(Given):
    def made(self):
        return [1.0, 1.2, 0.8, 1.1]


@habit(EQUAL, hard=True)
def numbers_popped():
    """Blocks pop their gains from a list."""
    return GivesNumbers(PopsNumber)


class GivesDeque(Given):
    def made(self):
        return collections.deque([1.0, 1.2, 0.8, 1.1])


class PopsLeft(Block):
    def forward(self, x, gains):
        gains.append(gains[0] * 0.9)
        return super().forward(x) * gains.popleft()


@habit(EQUAL, hard=True)
def deque_turned():
    """Blocks take from the left of a deque and put to its right."""
    return GivesDeque(PopsLeft)


class GivesMasks(Given):
    def forward(self, input_ids):
        masks = [(input_ids % k == 0).float()[..., None] for k in (2, 3, 5, 7)]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, masks)
        return self.head(x)


class PopsMask(Block):
    def forward(self, x, masks):
        return super().forward(x) + 0.3 * masks.pop()


@habit(EQUAL, hard=True)
def masks_popped():
    """Blocks pop masks of the batch from a list."""
    return GivesMasks(PopsMask)


class Pushes(Block):
    def forward(self, x, skips):
        y = super().forward(x)
        skips.append(y)
        return y


class Pops(Block):
    def forward(self, x, skips):
        return super().forward(x) + 0.5 * skips.pop()


class UNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Pushes(), Pushes(), Pops(), Pops()])

    def forward(self, input_ids):
        x, skips = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x, skips)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def skips_pushed_and_popped():
    """A U-Net whose blocks push to a list and pop from it."""
    return UNet()


class Tells(Block):
    def forward(self, x, tell):
        y = super().forward(x)
        tell(y.mean(1, keepdim=True))
        return y


class Collects(Net):
    def forward(self, input_ids):
        x, kept = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x, kept.append)
        return self.head(x + 0.3 * sum(kept))


@habit(OR_REFUSED, hard=True)
def callback_that_collects_tensors():
    """Blocks tell a callback of what they give; the model adds what was collected."""
    return Collects(Tells)


class TellsNumber(Block):
    n = 0

    def forward(self, x, tell):
        self.n += 1
        tell(self.n)
        return super().forward(x)


class CollectsNumbers(Net):
    def forward(self, input_ids):
        x, kept = self.embed(input_ids), []
        for block in self.blocks:
            x = block(x, lambda n: kept.append(n * 0.01))
        return self.head(x * (1 + sum(kept)))


@habit(OR_REFUSED, hard=True)
def callback_that_collects_numbers():
    """Blocks tell a callback how often they were called."""
    return CollectsNumbers(TellsNumber)


class AppendsCounter(Block):
    n = 0

    def forward(self, x, counts):
        self.n += 1
        counts.append(self.n)
        return super().forward(x)


class GivesList(Given):
    def made(self):
        return []

    def end(self, x, given):
        return x * (1 + 0.02 * sum(given))


@habit(EQUAL, hard=True)
def counter_appended():
    """Blocks append their counters to a list that the model reads at the end."""
    return GivesList(AppendsCounter)


class PutsItem(Block):
    n = 0

    def forward(self, x, book):
        self.n += 1
        book["calls"] = book.get("calls", 0) + self.n
        return super().forward(x)


class GivesDict(Given):
    def made(self):
        return {}

    def end(self, x, given):
        return x * (1 + 0.02 * given["calls"])


@habit(EQUAL, hard=True)
def counter_put_into_a_dict():
    """Blocks add up a number in a dict."""
    return GivesDict(PutsItem)


class Statistics(Block):
    def forward(self, x, book):
        y = super().forward(x)
        book.setdefault("norms", []).append(y.detach().norm().item())
        return y


class ReadsNorms(GivesDict):
    def end(self, x, given):
        return x / (1 + 0.001 * sum(given["norms"]))


@habit(OR_REFUSED, hard=True)
def norms_in_a_dict():
    """Blocks log norms as numbers; the model divides by their sum."""
    return ReadsNorms(Statistics)


class Logs(Block):
    def forward(self, x, book):
        y = super().forward(x)
        book.setdefault("norms", []).append(y.detach().norm().item())
        return y


@habit(OR_REFUSED)
def norms_that_nobody_reads():
    """The same, for a log alone."""
    return type("LogsOnly", (Given,), {"made": lambda self: {}})(Logs)


class OwnCounter(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x)


class ReadsOther(Net):
    def between(self, number, x):
        return x * (1 + 0.02 * self.blocks[0].n)


@habit(EQUAL, hard=True)
def counter_of_another_block():
    """The model's code reads the counter of its first block, everywhere."""
    return ReadsOther(OwnCounter)


_CALLS = 0


class CountsGlobally(Block):
    def forward(self, x):
        global _CALLS
        _CALLS += 1
        return super().forward(x) * (1 + 0.01 * _CALLS)


@habit(OR_REFUSED, hard=True)
def global_counter():
    """All blocks count up one global."""
    return Net(CountsGlobally)


_NUMBERS = itertools.count(1)


class TakesGlobally(Block):
    def forward(self, x):
        return super().forward(x) * (1 + 0.01 * next(_NUMBERS))


@habit(OR_REFUSED, hard=True)
def global_iterator():
    """All blocks take from one itertools.count of the module."""
    return Net(TakesGlobally)


_BOARD = {}


class PutsOnBoard(Block):
    def forward(self, x):
        y = super().forward(x)
        _BOARD["last"] = y.mean(1, keepdim=True)
        return y


class ReadsBoard(Net):
    def between(self, number, x):
        return x + 0.2 * _BOARD["last"]


@habit(OR_REFUSED, hard=True)
def tensor_in_a_global_dict():
    """Blocks leave a tensor in a module-level dict, and the model reads it."""
    return ReadsBoard(PutsOnBoard)


class CountsOnClass(Block):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x) * (1 + 0.005 * type(self).calls)


@habit(OR_REFUSED, hard=True)
def counter_on_the_class():
    """All blocks share a counter that lies on their class."""
    return Net(CountsOnClass)


_DEPTH = contextvars.ContextVar("depth", default=0)


class Deeper(Block):
    def forward(self, x):
        _DEPTH.set(_DEPTH.get() + 1)
        return super().forward(x) * (1 + 0.005 * _DEPTH.get())


@habit(OR_REFUSED, hard=True)
def context_variable():
    """Blocks count in a contextvars.ContextVar."""
    return Net(Deeper)


_HERE = threading.local()


class CountsHere(Block):
    def forward(self, x):
        _HERE.n = getattr(_HERE, "n", 0) + 1
        return super().forward(x) * (1 + 0.005 * _HERE.n)


@habit(OR_REFUSED, hard=True)
def thread_local():
    """Blocks count in a threading.local."""
    return Net(CountsHere)


def counting(block, held):
    forward = block.forward

    def counted(x):
        held["n"] += 1
        return forward(x) * (1 + 0.005 * held["n"])

    block.forward = counted
    return block


@habit(OR_REFUSED, hard=True)
def patched_forwards():
    """Forwards are wrapped by a function whose closure counts, one count for all."""
    net, held = Net(), {"n": 0}
    for block in net.blocks:
        counting(block, held)
    return net


class Cache:
    """Keys and values of all layers, as for generation."""

    def __init__(self):
        self.seen, self.keys = 0, []

    def update(self, key):
        self.keys.append(key)
        self.seen += key.shape[1]
        return torch.stack(self.keys).mean(0)


class Caches(Block):
    def forward(self, x, cache):
        return super().forward(x) + 0.2 * cache.update(x)


class GivesCache(Given):
    def made(self):
        return Cache()

    def end(self, x, given):
        return x * (1 + 0.001 * given.seen)


@habit(OR_REFUSED, hard=True)
def cache_object():
    """An object with lists that blocks fill and read, and a number that they count up."""
    return GivesCache(Caches)


class KeepsLoss(Block):
    def forward(self, x):
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class AddsLosses(Net):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + 0.05 * sum(block.aux for block in self.blocks), "logits": logits}


@habit(EQUAL)
def losses_kept_by_blocks():
    """Every block keeps an auxiliary loss as an attribute, and the model adds them up."""
    return AddsLosses(KeepsLoss)


class SharedList(Net):
    """All blocks append to one list of the model, emptied in every forward."""

    def __init__(self):
        super().__init__()
        self.losses = []
        for block in self.blocks:
            block.losses = self.losses

    def forward(self, input_ids, labels):
        self.losses.clear()
        logits = super().forward(input_ids)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + 0.05 * torch.stack(self.losses).sum(), "logits": logits}


class AppendsLoss(Block):
    def forward(self, x):
        y = super().forward(x)
        self.losses.append(y.square().mean())
        return y


class Listing(SharedList):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AppendsLoss() for _ in range(DEPTH))
        for block in self.blocks:
            block.losses = self.losses


@habit(OR_REFUSED, hard=True)
def losses_in_one_list():
    """Blocks append auxiliary losses to a list that they share."""
    return Listing()


class Rope(nn.Module):
    """cos of positions, made when first asked for, and again for longer sequences."""

    def __init__(self):
        super().__init__()
        self.cos = None

    def forward(self, length):
        if self.cos is None or len(self.cos) < length:
            self.cos = torch.outer(torch.arange(length), 0.5 ** torch.arange(WIDTH)).cos()
        return self.cos[:length]


class Rotates(Block):
    def __init__(self, rope):
        super().__init__()
        self.rope = rope

    def forward(self, x):
        return super().forward(x * self.rope(x.shape[1]))


@habit(EQUAL, hard=True)
def positions_made_lazily():
    """One cache of positions, shared by all blocks, made in the first forward."""
    rope = Rope()
    return Net(lambda: Rotates(rope))


@functools.lru_cache
def causal(length):
    return torch.full((length, length), float("-inf")).triu(1)


class Attends(Block):
    def forward(self, x):
        scores = x @ x.transpose(1, 2) / 4 + causal(x.shape[1])
        return super().forward(scores.softmax(-1) @ x)


@habit(EQUAL, hard=True)
def mask_behind_lru_cache():
    """A causal mask from a module-level lru_cache, made in the first block that asks."""
    return Net(Attends)


class LazyMask(Net):
    """A mask made in the model's own code, when it is first called, and kept."""

    mask = None

    def forward(self, input_ids):
        if self.mask is None:
            self.mask = causal(16)
        x, n = self.embed(input_ids), input_ids.shape[1]
        for block in self.blocks:
            x = block(x + 0.1 * self.mask[:n, :n].softmax(-1) @ x)
        return self.head(x)


@habit(EQUAL)
def mask_made_by_the_model():
    """A mask that is an attribute, made lazily by the model's code."""
    return LazyMask()


class Cached(Block):
    @functools.cached_property
    def scale(self):
        return 1 + float(self.mix.weight.detach().abs().mean())

    def forward(self, x):
        return super().forward(x) * self.scale


@habit(EQUAL, hard=True)
def cached_property_of_a_weight():
    """A number read from a block's own weight in its first forward, and kept."""
    return Net(Cached)


class Remembers(Block):
    """Keeps a number that others read."""

    def forward(self, x):
        y = super().forward(x)
        self.scale = float(y.detach().abs().mean())
        return y


class ReadsScale(Net):
    def between(self, number, x):
        return x / (1 + 0.1 * self.blocks[0].scale)


@habit(OR_REFUSED, hard=True)
def number_kept_and_read_by_others():
    """A block keeps a number of its activations; the model's code reads it behind every block."""
    return ReadsScale(Remembers)


class Captures(Net):
    """Forward hooks keep features of two blocks in a dict, which the model's code reads."""

    def __init__(self):
        super().__init__()
        self.features = {}
        for number in (0, 2):
            self.blocks[number].register_forward_hook(self.keep(number))

    def keep(self, number):
        def hook(module, args, output):
            self.features[number] = output

        return hook

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x + 0.3 * self.features[0] + 0.2 * self.features[2])


@habit(OR_REFUSED)
def features_captured_by_hooks():
    """Forward hooks for feature capture."""
    return Captures()


class CapturesNumbers(Captures):
    def keep(self, number):
        def hook(module, args, output):
            self.features[number] = 0.01 * output.detach().norm().item()

        return hook


@habit(OR_REFUSED, hard=True)
def norms_captured_by_hooks():
    """The same with numbers."""
    return CapturesNumbers()


class Kwargs(Block):
    def forward(self, x, *, scale=1.0, **rest):
        rest["log"].append(scale)
        return super().forward(x) * scale


class PassesOn(Net):
    def forward(self, input_ids):
        x, log = self.embed(input_ids), []
        for number, block in enumerate(self.blocks):
            told = {"scale": 1 + 0.1 * number, "log": log}
            x = block(x, **told)
        return self.head(x * (1 + 0.01 * sum(log)))


@habit(EQUAL)
def keyword_arguments():
    """Blocks take keywords, and append constants to a list."""
    return PassesOn(Kwargs)


class Budget(Block):
    """Takes from a budget that the object it is given holds, and stops when there is none."""

    def forward(self, x, state):
        if state.n >= 3:
            return x
        state.n += 1
        return super().forward(x)


@habit(EQUAL, hard=True)
def budget_that_runs_out():
    """The last block finds the budget used up and does nothing."""
    return Given(Budget)


class Keeps(Block):
    """A KV cache across calls: the mean of the former micro-batch."""

    def __init__(self):
        super().__init__()
        self.past = None

    def forward(self, x):
        y = super().forward(x)
        if self.past is not None:
            y = y + 0.2 * self.past
        self.past = y.detach().mean((0, 1))
        return y


@habit(EQUAL, hard=True)
def last_activations_of_a_block():
    """Every block adds the mean of what it gave in the former micro-batch."""
    return Net(Keeps)
