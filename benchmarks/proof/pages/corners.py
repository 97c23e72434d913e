"""Ways to keep state, to look at tensors and to call blocks that are seldom thought of, and that people do write."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import fractions
import functools
import io
import itertools
import logging
import random
import weakref
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.pages.edges import AGAIN
from proof.scene import VOCABULARY, WIDTH, Block, Net, Padded


class Scaled(Net):
    """Blocks return (x, number)."""

    def between(self, number, x):
        return x[0] * (1 + 0.02 * x[1])


class DefaultList(Block):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        return super().forward(x) * (1 + 0.005 * len(seen))


@habit(OR_REFUSED, hard=True)
def mutable_default():
    """A list as a default argument, which all blocks share and append to."""
    return Net(DefaultList)


def gain():
    gain.calls += 1
    return 1 + 0.005 * gain.calls


gain.calls = 0


class AsksFunction(Block):
    def forward(self, x):
        return super().forward(x) * gain()


@habit(OR_REFUSED, hard=True)
def attribute_of_a_function():
    """A function that counts its calls on itself."""
    return Net(AsksFunction)


SETTINGS = SimpleNamespace(step=0)


class Ticks(Block):
    def forward(self, x):
        SETTINGS.step += 1
        return super().forward(x) * (1 + 0.005 * SETTINGS.step)


@habit(OR_REFUSED, hard=True)
def attribute_of_a_global_object():
    """A module-level settings object whose step all blocks raise."""
    return Net(Ticks)


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class CountsSlots(Net):
    def __init__(self):
        super().__init__()
        self.state = Slotted()

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.03 * self.state.n)
        for block in self.blocks:
            x = block(x)
        self.state.n += 1
        return self.head(x)


@habit(EQUAL, hard=True)
def object_with_slots():
    """The model's counter lies in an object with __slots__."""
    return CountsSlots()


@dataclasses.dataclass(frozen=True)
class State:
    step: int = 0
    scale: float = 1.0


class Replaces(Net):
    def __init__(self):
        super().__init__()
        self.state = State()

    def forward(self, input_ids):
        x = self.embed(input_ids) * self.state.scale
        for block in self.blocks:
            x = block(x)
        self.state = dataclasses.replace(self.state, step=self.state.step + 1, scale=self.state.scale * 1.03)
        return self.head(x) / (1 + 0.01 * self.state.step)


@habit(EQUAL, hard=True)
def frozen_state_replaced():
    """A frozen dataclass is replaced at the end of every forward."""
    return Replaces()


class NumpyCounts(Net):
    def __init__(self):
        super().__init__()
        self.counts = np.zeros(2)

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.03 * float(self.counts[0]))
        for block in self.blocks:
            x = block(x)
        self.counts[0] += 1
        return self.head(x)


@habit(EQUAL, hard=True)
def numpy_counter():
    """A numpy array, changed in place at the end."""
    return NumpyCounts()


class BlockNumpy(Block):
    def __init__(self):
        super().__init__()
        self.counts = np.zeros(())

    def forward(self, x):
        self.counts += 1
        return super().forward(x), float(self.counts)


@habit(EQUAL, hard=True)
def numpy_counter_of_blocks():
    """Blocks count in numpy arrays and return the number."""
    return Scaled(BlockNumpy)


class Votes(Net):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()
        self.recent = collections.deque(maxlen=3)

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.02 * len(self.recent))
        for block in self.blocks:
            x = block(x)
        first = int(input_ids[0, 0]) % 3
        self.seen[first] += 1
        self.recent.append(first)
        return self.head(x) * (1 + 0.01 * max(self.seen.values()))


@habit(EQUAL, hard=True)
def counter_and_deque():
    """collections.Counter and a deque of what the batches were."""
    return Votes()


class TensorCounter(Net):
    """A tensor that is no buffer, changed in place at the end and read at the start."""

    def __init__(self):
        super().__init__()
        self.step = torch.zeros(())

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.03 * self.step)
        for block in self.blocks:
            x = block(x)
        self.step += 1
        return self.head(x)


@habit(EQUAL, hard=True)
def tensor_that_counts():
    """A plain tensor attribute counts forwards; it depends on no unit."""
    return TensorCounter()


class TensorCounterItem(TensorCounter):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) if self.step.item() < 6 else block(x) * 1.1
        self.step = self.step + 1
        return self.head(x)


@habit(EQUAL, hard=True, late=True)
def tensor_that_counts_read_as_a_number():
    """The same, replaced, and read through item()."""
    return TensorCounterItem()


class ScheduledBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()), persistent=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * (1 - 0.01 * self.step)
        self.step += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def buffer_that_counts_at_the_end():
    """A buffer that is not kept, raised behind the blocks and read between them."""
    return ScheduledBuffer()


def gains():
    value = 1.0
    while True:
        yield value
        value *= 0.99


class Generates(Net):
    def __init__(self):
        super().__init__()
        self.gains = gains()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * next(self.gains)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def generator_kept_by_the_model():
    """A schedule as a generator object, which the model's code advances between blocks."""
    return Generates()


class Cycles(Net):
    def __init__(self):
        super().__init__()
        self.gains = itertools.cycle([1.0, 1.2, 0.9])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x * next(self.gains))


@habit(OR_REFUSED, hard=True)
def cycle_kept_by_the_model():
    """itertools.cycle, advanced once in a forward, behind the blocks."""
    return Cycles()


class CyclesFirst(Cycles):
    def forward(self, input_ids):
        x = self.embed(input_ids) * next(self.gains)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@habit(OR_REFUSED)
def cycle_advanced_at_the_beginning():
    """The same before the blocks."""
    return CyclesFirst()


class BlockCycles(Block):
    def __init__(self):
        super().__init__()
        self.gains = itertools.cycle([1.0, 1.2, 0.9])

    def forward(self, x):
        return super().forward(x), next(self.gains)


@habit(OR_REFUSED, hard=True)
def cycle_kept_by_blocks():
    """Blocks return what their own itertools.cycle gives."""
    return Scaled(BlockCycles)


class OwnRandom(Net):
    def __init__(self):
        super().__init__()
        self.random = random.Random(5)

    def between(self, number, x):
        return x * (1 + 0.1 * self.random.random())


@habit(OR_REFUSED, hard=True)
def random_of_its_own():
    """random.Random(5) of the model, drawn from between blocks."""
    return OwnRandom()


class OwnNumpy(Net):
    def __init__(self):
        super().__init__()
        self.draw = np.random.default_rng(5)

    def between(self, number, x):
        return x * (1 + 0.1 * float(self.draw.random()))


@habit(OR_REFUSED, hard=True)
def numpy_generator_of_its_own():
    """numpy.random.default_rng(5) of the model, drawn from between blocks."""
    return OwnNumpy()


class BlockRandom(Block):
    def __init__(self):
        super().__init__()
        self.random = random.Random(5)

    def forward(self, x):
        return super().forward(x), self.random.random()


@habit(OR_REFUSED, hard=True)
def random_of_every_block():
    """Blocks return what a random.Random of their own gives."""
    return Scaled(BlockRandom)


_AUX = []


class Registers(Block):
    def forward(self, x):
        y = super().forward(x)
        _AUX.append(y.square().mean())
        return y


class Gathers(Net):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        total = torch.stack(_AUX).sum()
        _AUX.clear()
        return {"loss": own + 0.05 * total, "logits": logits}


@habit(OR_REFUSED, hard=True)
def losses_in_a_global_list():
    """Auxiliary losses in a module-level list, which the model empties at the end."""
    return Gathers(Registers)


_BY_MODULE = weakref.WeakKeyDictionary()


class Weakly(Block):
    def forward(self, x):
        _BY_MODULE[self] = _BY_MODULE.get(self, 0) + 1
        return super().forward(x)


class ReadsWeakly(Net):
    def between(self, number, x):
        return x * (1 + 0.01 * sum(_BY_MODULE.values()))


@habit(OR_REFUSED, hard=True)
def counts_in_a_weak_dictionary():
    """Calls by module in a global WeakKeyDictionary."""
    return ReadsWeakly(Weakly)


class Writes(Block):
    def forward(self, x, out):
        out.write("block;")
        return super().forward(x)


class ReadsText(Net):
    def forward(self, input_ids):
        x, out = self.embed(input_ids), io.StringIO()
        for block in self.blocks:
            x = block(x, out)
        return self.head(x * (1 + 0.01 * out.getvalue().count("block")))


@habit(OR_REFUSED, hard=True)
def text_written_by_blocks():
    """Blocks write to a StringIO, and the model counts what is in it."""
    return ReadsText(Writes)


class Renames(Block):
    """After a warm-up it is another function."""

    n = 0

    def forward(self, x):
        self.n += 1
        if self.n == 5:
            self.mixed = torch.relu
        return x + getattr(self, "mixed", torch.tanh)(self.mix(x))


@habit(EQUAL, late=True)
def activation_replaced():
    """A block takes another activation from its fifth call on."""
    return Net(Renames)


class Modules(Block):
    def __init__(self):
        super().__init__()
        self.act, self.n = nn.Tanh(), 0

    def forward(self, x):
        self.n += 1
        if self.n == 5:
            self.act = nn.ReLU()
        return x + self.act(self.mix(x))


@habit(OR_REFUSED, late=True)
def module_replaced():
    """The same with a module."""
    return Net(Modules)


class Switches(Net):
    """The model replaces its own forward after the first step."""

    n = 0

    def forward(self, input_ids):
        self.n += 1
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if self.n == 5:
            self.end = self.louder
        return self.head(self.end(x))

    def end(self, x):
        return x

    def louder(self, x):
        return x * 1.2


@habit(EQUAL, late=True)
def method_replaced():
    """A method of the model is replaced by another one in the second step, at the end of the forward."""
    return Switches()


class Exit(Exception):
    def __init__(self, value):
        super().__init__()
        self.value = value


class Throws(Block):
    def forward(self, x):
        raise Exit(super().forward(x))


class Catches(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            try:
                x = block(x)
            except Exit as found:
                x = found.value
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def raised_and_caught():
    """Blocks hand over what they make in an exception."""
    return Catches(Throws)


class Tries(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            try:
                x = block(x, scale=1.1)
            except TypeError:
                x = block(x)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def calls_tried():
    """A keyword that blocks do not take is tried, and given up."""
    return Tries()


class AsksType(Net):
    def between(self, number, x):
        return x * (1.1 if type(x) is Tensor else 0.5)


@habit(EQUAL, hard=True)
def type_asked_exactly():
    """`type(x) is Tensor` between blocks."""
    return AsksType()


class AsksGraph(Net):
    def between(self, number, x):
        if x.requires_grad and x.grad_fn is not None and not x.is_leaf:
            x = x * 1.1
        return x


@habit(OR_REFUSED, hard=True)
def graph_asked():
    """requires_grad, grad_fn and is_leaf between blocks."""
    return AsksGraph()


class AsksLayout(Net):
    def between(self, number, x):
        assert isinstance(x, Tensor) and x.is_contiguous() and x.stride(-1) == 1 and x.layout == torch.strided
        return x * (1 + 0.01 * x.ndim) if x.device.type == "cpu" and x.is_floating_point() else x


@habit(EQUAL)
def layout_asked():
    """Strides, layout and device between blocks."""
    return AsksLayout()


class AsksVersion(Net):
    def between(self, number, x):
        x.add_(0.01)
        return x * (1 + 0.01 * x._version)


@habit(OR_REFUSED, hard=True)
def version_asked():
    """How often a tensor was written to."""
    return AsksVersion()


class Prints(Net):
    def __init__(self):
        super().__init__()
        self.lines = []

    def between(self, number, x):
        self.lines.append(f"block {number}: {x.detach().mean():.3f} {x.shape}")
        logging.getLogger("proof").debug("activations %s", x)
        return x


@habit(OR_REFUSED)
def numbers_in_a_log():
    """Means of activations are formatted into a list that nobody reads."""
    return Prints()


class LogsInBlock(Block):
    def __init__(self):
        super().__init__()
        self.lines = []

    def forward(self, x):
        y = super().forward(x)
        self.lines.append(f"{y.detach().std().item():.3f}")
        return y


@habit(EQUAL)
def numbers_in_a_log_of_every_block():
    """The same within blocks."""
    return Net(LogsInBlock)


class Parts(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        x = nn.Sequential(*self.blocks[:2])(x)
        x = functools.reduce(lambda y, block: block(y), self.blocks[2:], x)
        return self.head(x)


@habit(EQUAL)
def blocks_in_slices():
    """A Sequential made in the forward, and functools.reduce."""
    return Parts()


class Converges(Net):
    """A block is called until little changes."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            for _ in range(3):
                y = block(x)
                moved = (y - x).abs().mean()
                x = y
                if moved < 0.33:
                    break
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def called_until_little_changes():
    """How often a block is called depends on numbers."""
    return Converges()


class Lends(Net):
    """No head: the logits are made with the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Identity()

    def forward(self, input_ids):
        return F.linear(super().forward(input_ids), self.embed.weight)


@habit(EQUAL)
def embedding_as_the_head():
    """F.linear with the embedding's weight, in the model's code."""
    return Lends()


class GivesWeight(Block):
    def forward(self, x):
        return super().forward(x), self.mix.weight


class UsesWeight(Net):
    def between(self, number, x):
        return x[0] + 0.1 * F.linear(x[0], x[1])


@habit(OR_REFUSED, hard=True)
def parameter_returned():
    """Blocks return their weight, which the model's code uses, and which is trained by it."""
    return UsesWeight(GivesWeight)


class TakesWeight(Block):
    def forward(self, x, weight):
        return super().forward(x) + 0.1 * F.linear(x, weight)


class PassesWeight(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x, self.blocks[number - 1].mix.weight)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def parameter_passed():
    """Every block is given the weight of the one before it, the first that of the last."""
    return PassesWeight(TakesWeight)


class GivesModule(Block):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x), self.out


class CallsModule(Net):
    def between(self, number, x):
        return x[0] + 0.1 * x[1](x[0])


@habit(OR_REFUSED, hard=True)
def module_returned():
    """Blocks return a module of theirs, which the model's code calls."""
    return CallsModule(GivesModule)


class Values(Block):
    n = 0

    def __init__(self, make=None):
        super().__init__()
        self.make = make

    def forward(self, x):
        self.n += 1
        return super().forward(x), self.make(self.n)


class ReadsValues(Net):
    def between(self, number, x):
        return x[0] * (1 + 0.01 * float(x[1]))


@habit(EQUAL, hard=True)
def numpy_scalar_returned():
    """np.float32."""
    return ReadsValues(lambda: Values(np.float32))


@habit(OR_REFUSED, hard=True)
def fraction_returned():
    """fractions.Fraction."""
    return ReadsValues(lambda: Values(lambda n: fractions.Fraction(n, 3)))


@habit(EQUAL, hard=True)
def thirds_returned():
    """Floats that no short text holds, and integers by turns."""
    return ReadsValues(lambda: Values(lambda n: n / 3 if n % 2 else 2**70 // (n * 3**40)))


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


@habit(OR_REFUSED, hard=True, late=True)
def int_enum_returned():
    """An IntEnum, another one from the sixth call on."""
    return ReadsValues(lambda: Values(lambda n: Level.LOW if n < 6 else Level.HIGH))


class Infinite(Net):
    def between(self, number, x):
        return x[0].clamp(max=x[1])


@habit(EQUAL, hard=True, late=True)
def infinite_at_first():
    """A limit that is infinite until the sixth call."""
    return Infinite(lambda: Values(lambda n: float("inf") if n < 6 else 1.0))


@habit(OR_REFUSED, hard=True)
def array_returned():
    """A numpy array that changes."""
    return ReadsValues(lambda: Values(lambda n: np.array(n)))


class FrozenSets(Net):
    def between(self, number, x):
        return x[0] * (1 + 0.02 * len(x[1]))


@habit(OR_REFUSED, hard=True)
def frozenset_returned():
    """A frozenset whose size changes."""
    return FrozenSets(lambda: Values(lambda n: frozenset(range(n % 4))))


class Words(Net):
    def between(self, number, x):
        return x[0] * (1 + 0.005 * len(x[1]) + 0.01 * x[1].count(b"o"))


@habit(OR_REFUSED, hard=True)
def bytes_returned():
    """Bytes that become longer."""
    return Words(lambda: Values(lambda n: b"on" * (n % 5)))


@habit(OR_REFUSED, hard=True)
def range_returned():
    """A range that becomes longer."""
    return FrozenSets(lambda: Values(lambda n: range(n % 4)))


class Cam(Block):
    """A backward hook reads what the forward kept last."""

    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(self.scaled)

    def forward(self, x):
        self.size = x.detach().abs().mean()
        return super().forward(x)

    def scaled(self, module, grads, outputs):
        return tuple(None if g is None else g * (0.5 + self.size) for g in grads)


@habit(OR_REFUSED, hard=True)
def backward_hook_that_reads_the_last_forward():
    """Gradients are scaled by the size of what the block was given last: a schedule may have run other forwards."""
    return Net(Cam)


class HookReadsModel(Net):
    """The same with a tensor hook that reads an attribute when it runs."""

    def between(self, number, x):
        if number == 1:
            self.size = x.detach().abs().mean()
            if x.requires_grad:
                x.register_hook(lambda grad: grad * (0.5 + self.size))
        return x


@habit(OR_REFUSED, hard=True)
def tensor_hook_that_reads_the_last_forward():
    """A tensor hook reads an attribute that every forward sets."""
    return HookReadsModel()


class HookKeepsOwn(Net):
    def between(self, number, x):
        size = x.detach().abs().mean()
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (0.5 + size))
        return x


@habit(EQUAL, hard=True)
def tensor_hook_with_its_own_forward():
    """A tensor hook that reads what was computed with it."""
    return HookKeepsOwn()


class ParameterHook(Block):
    """A hook of a parameter reads what the forward kept last."""

    def __init__(self):
        super().__init__()
        self.size = 1.0
        self.mix.weight.register_hook(lambda grad: grad * self.size)

    def forward(self, x):
        self.size = 0.5 + x.detach().abs().mean()
        return super().forward(x)


@habit(OR_REFUSED, hard=True)
def parameter_hook_that_reads_the_last_forward():
    """Gradients of a weight are scaled by what its block was given last."""
    return Net(ParameterHook)


class KeepsClass(torch.autograd.Function):
    """What the forward keeps for the backward lies on the class, and not in the context."""

    kept = None

    @staticmethod
    def forward(ctx, x):
        KeepsClass.kept = x.detach().sign()
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        return grad * KeepsClass.kept


class UsesKeeps(Block):
    def forward(self, x):
        return super().forward(x) + 0.1 * KeepsClass.apply(self.mix(x))


@habit(OR_REFUSED, hard=True)
def backward_that_reads_a_class():
    """A function of one's own whose backward reads what the last forward has left on its class."""
    net = Net()
    net.blocks[1] = UsesKeeps()
    return net


class BatchChanges(Net):
    """Masks tokens in place in the batch that it was given."""

    def forward(self, input_ids):
        input_ids[:, 2] = (input_ids[:, 2] + 1) % VOCABULARY
        return super().forward(input_ids)


@habit(EQUAL)
def batch_changed_in_place():
    """The forward writes to its batch."""
    return BatchChanges()


@habit(OR_REFUSED, hard=True, plan=AGAIN)
def batch_changed_in_place_under_recompute():
    """The same, and the schedule runs the forward twice."""
    return BatchChanges()


class Masks(Net):
    """Replaces some tokens by chance, as BERT's training does."""

    def forward(self, input_ids):
        hidden = torch.rand(input_ids.shape) < 0.15
        return super().forward(input_ids.masked_fill(hidden, 0))


@habit(EQUAL, draws=True)
def tokens_masked_by_chance():
    """torch.rand before the embedding."""
    return Masks()


class Reseeds(Net):
    n = 0

    def forward(self, input_ids):
        self.n += 1
        torch.manual_seed(self.n)
        x = self.embed(input_ids) + 0.1 * torch.randn(WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@habit(EQUAL, draws=True)
def seeded_in_the_forward():
    """torch.manual_seed(step) in the forward, and noise."""
    return Reseeds()


class BranchOnBatch(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        if len(set(input_ids.flatten().tolist())) > 14:
            x = x * 1.1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + 0.001 * int(input_ids.max()))


@habit(EQUAL)
def branch_on_the_batch():
    """Python over the batch's tokens."""
    return BranchOnBatch()


class CountsLabels(Net):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        count = labels[:, 1:].ne(-100).sum().item()
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / count, "logits": logits}


@habit(EQUAL)
def labels_counted():
    """The loss is a sum over a count that item() gives."""
    return CountsLabels()


class TwoHeads(Net):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"even": nn.Linear(WIDTH, VOCABULARY), "odd": nn.Linear(WIDTH, VOCABULARY)})

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.heads["odd" if int(input_ids[0, 0]) % 2 else "even"](x)


@habit(OR_REFUSED, hard=True)
def head_by_the_task():
    """The first token says which head is called."""
    net = TwoHeads()
    del net.head
    return net


class Trims(Net):
    """Cuts the batch to its longest row."""

    def forward(self, input_ids, attention_mask):
        longest = int(attention_mask.sum(1).max())
        x = self.embed(input_ids[:, :longest])
        for block in self.blocks:
            x = block(x)
        return F.pad(self.head(x), (0, 0, 0, input_ids.shape[1] - longest))


@habit(OR_REFUSED, hard=True, data=Padded)
def trimmed_to_the_longest_row():
    """What crosses is as long as the mask says."""
    return Trims()


class Packed(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(4))

    def forward(self, input_ids, attention_mask):
        lengths = attention_mask.sum(1).cpu()
        x = nn.utils.rnn.pack_padded_sequence(self.embed(input_ids), lengths, batch_first=True, enforce_sorted=False)
        for block in self.blocks:
            x, _ = block(x)
        x, _ = nn.utils.rnn.pad_packed_sequence(x, batch_first=True, total_length=input_ids.shape[1])
        return self.head(x)


@habit(OR_REFUSED, hard=True, data=Padded)
def packed_sequences():
    """pack_padded_sequence across recurrent layers."""
    return Packed()


class Depths(Block):
    """Mixture of depths: only the tokens that a router likes go through."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x):
        score = self.router(x).squeeze(-1)
        best = score.topk(5, -1)
        rows = best.indices[..., None].expand(-1, -1, WIDTH)
        y = super().forward(x.gather(1, rows)) * best.values.sigmoid()[..., None]
        return x.scatter(1, rows, y)


@habit(EQUAL)
def mixture_of_depths():
    """topk, gather and scatter in blocks."""
    return Net(Depths)


class Hyper(Net):
    """The first block makes weights for the others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH * WIDTH), *(Adapts() for _ in range(3))])

    def forward(self, input_ids):
        x = self.embed(input_ids)
        weight = self.blocks[0](x.mean(1)).view(-1, WIDTH, WIDTH)
        for block in self.blocks[1:]:
            x = block(x, weight)
        return self.head(x)


class Adapts(Block):
    def forward(self, x, weight):
        return super().forward(x) + 0.1 * torch.bmm(x, weight)


@habit(EQUAL)
def weights_made_by_a_block():
    """A hyper-network."""
    return Hyper()


class Shares(Net):
    """Later layers read keys and values of earlier ones, out of a list of pairs."""

    def forward(self, input_ids):
        x, pairs = self.embed(input_ids), []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, pairs[number // 2] if number > 1 else None)
            pairs.append(pair)
        return self.head(x)


class Attends(Block):
    def forward(self, x, pair):
        key, value = pair if pair is not None else (self.mix(x), x)
        y = (x @ key.transpose(1, 2) / 4).softmax(-1) @ value
        return super().forward(y), (key, value)


@habit(EQUAL)
def keys_and_values_shared_by_layers():
    """Cross-layer attention."""
    return Shares(Attends)


class Gumbel(Block):
    def forward(self, x):
        y = super().forward(x)
        return y + 0.1 * F.gumbel_softmax(y, tau=1.0, hard=True)


@habit(EQUAL, draws=True)
def gumbel():
    """F.gumbel_softmax in blocks."""
    return Net(Gumbel)


class CopiesTensors(Net):
    def between(self, number, x):
        kept = copy.copy(x)
        self.last = copy.deepcopy(x.detach())
        return x + 0.05 * kept + 0.05 * self.last


@habit(OR_REFUSED, hard=True)
def tensors_copied():
    """copy.copy and copy.deepcopy of what blocks give."""
    return CopiesTensors()


class ByTensor(Net):
    """Tensors as keys of a dict, and looked for by identity."""

    def forward(self, input_ids):
        x, order = self.embed(input_ids), {}
        for number, block in enumerate(self.blocks):
            x = block(x)
            order[x] = number
        return self.head(sum(y * 0.1 * number for y, number in order.items()) + x * (1 + order[x]))


@habit(EQUAL)
def tensors_as_keys():
    """A dict by tensors."""
    return ByTensor()


class Eager(Net):
    """Requires a gradient of the embedding's output, as adapters do."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def forward(self, input_ids):
        x = self.embed(input_ids).requires_grad_(True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@habit(EQUAL)
def gradient_required_of_an_output():
    """requires_grad_() on what a frozen embedding gives."""
    return Eager()


class Accumulates(Net):
    """Counts micro-batches of a step, as a training loop would."""

    micro = 0
    total = 0.0

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.total += loss.item()
        self.micro = (self.micro + 1) % 4
        scale = 1.0 if self.micro else 1 / (1 + 0.01 * self.total)
        if not self.micro:
            self.total = 0.0
        return {"loss": loss * scale, "logits": logits}


@habit(OR_REFUSED, hard=True)
def losses_added_up_by_the_model():
    """A sum of item()s, read and set back at the end of every fourth forward."""
    return Accumulates()


class Wrapped(nn.Module):
    """The net is inside of a wrapper that counts, beside its loss."""

    def __init__(self, net):
        super().__init__()
        self.net, self.calls = net, 0

    def forward(self, input_ids, labels):
        self.calls += 1
        logits = self.net(input_ids * (1 if self.calls else 0))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss * (1 + 0.01 * self.calls), "logits": logits}


@habit(EQUAL)
def wrapper_that_counts():
    """A wrapper that counts before the net and reads behind it."""
    return Wrapped(Net())


class Vmapped(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.vmap(block)(x)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def blocks_under_vmap():
    """torch.vmap of every block over the batch."""
    return Vmapped()


class HooksOfAll(Block):
    """A forward pre-hook with a counter scales the input."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.calls += 1
        return (args[0] * (1 + 0.01 * self.calls),)


@habit(EQUAL, hard=True)
def pre_hooks_that_count():
    """Forward pre-hooks of blocks with counters of their own."""
    return Net(HooksOfAll)


class HookTells(Net):
    """A forward hook of every block counts on the model, which reads the sum at the start and at the end."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        for block in self.blocks:
            block.register_forward_hook(self.count)

    def count(self, module, args, output):
        self.calls += 1

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.005 * self.calls)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + 0.005 * self.calls)


@habit(EQUAL, hard=True)
def hooks_that_count_on_the_model():
    """Forward hooks of all blocks raise one number of the model."""
    return HookTells()
