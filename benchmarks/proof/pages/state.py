"""Python state that a model's own code keeps from one forward to the next: counters, flags, memories, schedules."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import WIDTH, Block, Net


@habit(EQUAL)
def plain_net():
    """Nothing special."""
    return Net()


class AtTheEnd(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.05 * self.n)
        for block in self.blocks:
            x = block(x)
        self.n += 1
        return self.head(x)


@habit(EQUAL, hard=True)
def counter_raised_at_the_end():
    """Raised behind the blocks, read before them."""
    return AtTheEnd()


class Warm(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            y = block(x)
            x = y if self.n >= 6 else 0.5 * (x + y)
        self.n += 1
        return self.head(x)


@habit(EQUAL, hard=True, late=True)
def warm_up_of_residuals():
    """Residual branches at half strength for six micro-batches, by a counter raised at the end."""
    return Warm()


class Flag(Net):
    loud = False

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1.2 if self.loud else 1.0)
        self.loud = True
        for block in self.blocks:
            x = block(x)
        self.loud = False
        return self.head(x)


class ReadsFlag(Block):
    def __init__(self, net=None):
        super().__init__()
        object.__setattr__(self, "net", net)

    def forward(self, x):
        return super().forward(x) * (1.1 if self.net.loud else 0.9)


@habit(EQUAL, hard=True)
def flag_put_back():
    """A flag of the model that blocks read, set before them and put back behind them."""
    net = Flag()
    net.blocks = nn.ModuleList(ReadsFlag(net) for _ in range(4))
    return net


class FlagFirst(Net):
    """The first micro-batch of all is treated otherwise."""

    is_first = True

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.is_first:
            x = x * 0.7
        for block in self.blocks:
            x = block(x)
        self.is_first = False
        return self.head(x)


@habit(EQUAL, hard=True)
def first_time():
    """A flag that falls at the end of the first forward."""
    return FlagFirst()


class Memory(Net):
    past = None

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.past is not None:
            x = x + 0.2 * self.past
        for block in self.blocks:
            x = block(x)
        self.past = x.detach().mean((0, 1))
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def memory_of_the_last_batch():
    """The last hidden states are added to the next batch's embedding (Transformer-XL)."""
    return Memory()


class LayerMemory(Net):
    """One memory per layer, kept as a list."""

    def __init__(self):
        super().__init__()
        self.past = [None] * 4

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            if self.past[number] is not None:
                x = x + 0.1 * self.past[number]
            x = block(x)
            self.past[number] = x.detach().mean((0, 1))
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def memories_of_layers():
    """A list of memories, one for each block, each read before the block and set behind it."""
    return LayerMemory()


class Former(Net):
    """What the first block gave last time is read behind the third."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def between(self, number, x):
        if number == 2 and self.kept is not None:
            x = x + 0.2 * self.kept
        if number == 0:
            self.new = x.detach().mean((0, 1))
        if number == 3:
            self.kept = self.new
        return x


@habit(OR_REFUSED, hard=True)
def former_state_of_another_block():
    """Read two stages behind, one batch later."""
    return Former()


class Frozen(Net):
    def forward(self, input_ids):
        x = first = self.embed(input_ids)
        torch.set_grad_enabled(False)
        x = self.blocks[1](self.blocks[0](x))
        torch.set_grad_enabled(torch.is_inference_mode_enabled() is False and self.training)
        x = self.blocks[3](self.blocks[2](x + first))
        return self.head(x)


@habit(EQUAL, hard=True)
def gradients_switched_off_and_on():
    """torch.set_grad_enabled around two blocks, with a skip past them."""
    return Frozen()


class Averages(Net):
    """A moving average of the embedding's size, as a Python float, made and read in its own code."""

    mean = 1.0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean().item()
        x = x / self.mean
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def running_mean_as_a_float():
    """item() in the model's own code, of what the first unit gives."""
    return Averages()


class LossHistory(Net):
    """The loss that the model makes is divided by a moving average of itself."""

    average = None

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        now = loss.item()
        self.average = now if self.average is None else 0.8 * self.average + 0.2 * now
        return {"loss": loss * (2 - now / self.average), "logits": logits}


@habit(OR_REFUSED, hard=True)
def moving_average_of_the_loss():
    """Kept as a float, read by the last stage alone."""
    return LossHistory()


class Turns(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks if self.n % 2 == 0 else reversed(self.blocks):
            x = block(x)
        self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def blocks_in_reverse_by_turns():
    """Every second micro-batch goes through the blocks backwards."""
    return Turns()


class Grows(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in list(self.blocks)[: 4 if self.n >= 8 else 2]:
            x = block(x)
        self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True, late=True)
def progressive_depth():
    """Two blocks in the first two steps, then all four."""
    return Grows()


class SkipsLater(Net):
    n = 0

    def forward(self, input_ids):
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if self.n >= 5:
            x = x + 0.3 * first
        self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True, late=True)
def skip_from_the_second_step_on():
    """A long skip that the first step does not have."""
    return SkipsLater()


class DetachesLater(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if self.n >= 8 and number == 2 else x)
        self.n += 1
        return self.head(x)


@habit(EQUAL, hard=True, late=True)
def frozen_below_from_the_third_step_on():
    """The lower half is detached after two steps."""
    return DetachesLater()


class DetachesFirst(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if self.n < 8 and number == 2 else x)
        self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True, late=True)
def frozen_below_for_two_steps():
    """The lower half is detached for two steps, then not."""
    return DetachesFirst()


class Unfreezes(Net):
    n = 0

    def forward(self, input_ids):
        self.n += 1
        self.blocks.requires_grad_(self.n > 6)
        return super().forward(input_ids)


@habit(OR_REFUSED, hard=True, late=True)
def unfrozen_by_itself():
    """The model's own forward freezes its blocks in the first micro-batches."""
    return Unfreezes()


class Anneals(Net):
    temperature = 2.0

    def forward(self, input_ids):
        logits = super().forward(input_ids) / self.temperature
        self.temperature = max(1.0, self.temperature * 0.93)
        return logits


@habit(EQUAL, hard=True)
def temperature_of_the_head():
    """Annealed from call to call, read and set at the end alone."""
    return Anneals()


class AnnealsBoth(Net):
    temperature = 2.0

    def forward(self, input_ids):
        x = self.embed(input_ids) * self.temperature
        for block in self.blocks:
            x = block(x)
        self.temperature = 1 + (self.temperature - 1) * 0.8
        return self.head(x) / self.temperature


@habit(EQUAL, hard=True)
def temperature_of_both_ends():
    """Read before the blocks, changed behind them."""
    return AnnealsBoth()


class Cosine(Net):
    """A schedule by a counter raised at the beginning."""

    step = 0

    def forward(self, input_ids):
        self.step += 1
        strength = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.step / 16))
        x = self.embed(input_ids)
        for block in self.blocks:
            y = block(x)
            x = x + (y - x) * (1 - 0.5 * strength)
        return self.head(x)


@habit(EQUAL)
def schedule_by_a_counter_at_the_beginning():
    """A cosine in the number of forwards."""
    return Cosine()


class Once(Net):
    """Statistics of the first batch of all decide a scale (as ActNorm)."""

    scale = None

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if self.scale is None:
            self.scale = 1 / (x.detach().std((0, 1)) + 0.1)
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def scale_from_the_first_batch():
    """A tensor attribute of the model, made of what its first unit gives in the first forward."""
    return Once()


class ActNorm(Block):
    """Its parameters are set by the first batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std((0, 1)) + 1e-2))
                self.shift.copy_(-x.mean((0, 1)) * self.scale)
                self.is_set.fill_(True)
        return super().forward(x * self.scale + self.shift)


@habit(OR_REFUSED, hard=True)
def parameters_set_by_the_first_batch():
    """ActNorm: a buffer says whether, parameters are written in a forward."""
    return Net(ActNorm)


class ActNormPython(ActNorm):
    done = False

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std((0, 1)) + 1e-2))
            self.done = True
        return Block.forward(self, x * self.scale + self.shift)


@habit(EQUAL, hard=True)
def parameters_set_by_the_first_batch_flag_in_python():
    """The same with a Python flag, in the block itself."""
    return Net(ActNormPython)


class Center(Net):
    """DINO: a center of the logits follows them, as a buffer of the last stage."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(31))

    def forward(self, input_ids):
        logits = super().forward(input_ids)
        out = logits - self.center
        if self.training:
            self.center.lerp_(logits.detach().mean((0, 1)), 0.1)
        return out


@habit(EQUAL)
def center_of_the_logits():
    """A buffer read and updated behind the head."""
    return Center()


class CenterBefore(Net):
    """The same buffer, read before the blocks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, input_ids):
        x = self.embed(input_ids) - self.center
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.center.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.head(x)


@habit(OR_REFUSED)
def center_read_before_the_blocks():
    """A buffer that the last stage updates and the first one reads."""
    return CenterBefore()


class History(Net):
    """A list of what happened, whose length decides."""

    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.02 * len(self.log))
        for block in self.blocks:
            x = block(x)
        self.log.append(tuple(x.shape))
        return self.head(x)


@habit(EQUAL, hard=True)
def length_of_a_log():
    """A list that grows by an entry at the end of every forward."""
    return History()


class Statistics(nn.Module):
    """A helper module without parameters, with state of its own, called behind the blocks."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.03 * self.calls)


class Helped(Net):
    def __init__(self):
        super().__init__()
        self.helper = Statistics()

    def forward(self, input_ids):
        x = self.embed(input_ids) / (1 + 0.05 * self.helper.calls)
        for block in self.blocks:
            x = block(x)
        return self.head(self.helper(x))


@habit(EQUAL, hard=True)
def counter_of_a_helper():
    """A module without parameters counts behind the blocks, and is read before them."""
    return Helped()


class Interval(Net):
    """Every fifth forward has an extra term, and a counter is set back."""

    left = 5

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        self.left -= 1
        if self.left == 0:
            self.left = 5
            x = x * 1.3
        return self.head(x)


@habit(EQUAL, hard=True, late=True)
def every_fifth_time():
    """Something happens in every fifth forward, so first in the second step, at the end."""
    return Interval()


class IntervalBefore(Interval):
    def forward(self, input_ids):
        x = self.embed(input_ids) * (1.3 if self.left == 1 else 1.0)
        for block in self.blocks:
            x = block(x)
        self.left = self.left - 1 or 5
        return self.head(x)


@habit(EQUAL, hard=True, late=True)
def every_fifth_time_before_the_blocks():
    """The same, read before the blocks."""
    return IntervalBefore()


class Swaps(Net):
    """Two heads by turns of steps."""

    n = 0

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, 31)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        self.n += 1
        return self.head(x) if self.n <= 4 else self.other(x)


@habit(OR_REFUSED, hard=True, late=True)
def other_head_from_the_second_step_on():
    """A second head that the first step never calls."""
    return Swaps()


class StepsBuffer(Net):
    """The counter is a buffer, raised before the blocks, read on all stages."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids):
        self.steps += 1
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * (1 + 0.01 * self.steps)
        return self.head(x)


@habit(EQUAL)
def counter_in_a_buffer():
    """Raised before the blocks and multiplied with behind each."""
    return StepsBuffer()


class StepsBufferItem(StepsBuffer):
    def forward(self, input_ids):
        self.steps += 1
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * (1.1 if self.steps.item() > 6 else 1.0)
        return self.head(x)


@habit(OR_REFUSED, late=True)
def counter_in_a_buffer_read_as_a_number():
    """The same, through item() and a branch that turns in the second step."""
    return StepsBufferItem()


class Dropped(Net):
    """Stochastic depth by Python's random."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            if not self.training or random.random() > 0.1 * number:
                x = block(x)
        return self.head(x)


@habit(OR_REFUSED, draws=True)
def stochastic_depth_by_random():
    """Blocks are left out by random.random() in the model's code."""
    return Dropped()


class DropPath(Block):
    def forward(self, x):
        y = super().forward(x)
        keep = torch.rand(x.shape[0], 1, 1) > 0.2
        return x + (y - x) * keep / 0.8


@habit(EQUAL, draws=True)
def stochastic_depth_by_rows():
    """Every block drops itself for some rows, by torch.rand."""
    return Net(DropPath)


class Dropout(Block):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.2, self.training))


@habit(EQUAL, draws=True)
def dropout():
    """Dropout within blocks."""
    return Net(Dropout)


class SelfGate(Block):
    """A block that skips itself by Python's random."""

    def forward(self, x):
        return x if self.training and random.random() < 0.3 else super().forward(x)


@habit(EQUAL, draws=True)
def blocks_that_skip_themselves():
    """The decision is within the block."""
    return Net(SelfGate)


class Progress(Net):
    """How far training is, told to all blocks by an attribute."""

    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            block.progress = self.n / 16
            x = block(x)
        self.n += 1
        return self.head(x)


class ReadsProgress(Block):
    progress = 0.0

    def forward(self, x):
        return super().forward(x) * (1 + 0.2 * self.progress)


@habit(EQUAL, hard=True)
def progress_told_to_blocks():
    """The model sets a number on every block before it calls it."""
    return Progress(ReadsProgress)


class Raises(Net):
    """A counter in a try/finally and a context manager of the author's own."""

    depth = 0
    total = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1
        self.total += 1

    def forward(self, input_ids):
        with self:
            x = self.embed(input_ids) * (1 + 0.05 * self.depth + 0.02 * self.total)
            for block in self.blocks:
                x = block(x)
            return self.head(x)


@habit(EQUAL, hard=True)
def context_manager_of_the_model():
    """What a `with` raises and lowers around the whole forward, and counts."""
    return Raises()


class MixedPrecision(Net):
    def forward(self, input_ids):
        before = torch.get_default_dtype()
        x = self.embed(input_ids) * (1.2 if before is torch.float64 else 1.0)
        torch.set_default_dtype(torch.float64)
        for block in self.blocks:
            x = block(x + torch.zeros(WIDTH).fill_(0.01).to(x.dtype))
        torch.set_default_dtype(before)
        return self.head(x) + torch.full((31,), 0.5)


@habit(EQUAL, hard=True)
def default_type_set_and_put_back():
    """torch.set_default_dtype around the blocks."""
    return MixedPrecision()


class Retry(Net):
    """The state of the last forward is read when the next one begins, only then set anew."""

    last_length = 0

    def forward(self, input_ids):
        extra = 0.1 if self.last_length == input_ids.shape[1] else 0.0
        x = self.embed(input_ids) + extra
        for block in self.blocks:
            x = block(x)
        self.last_length = x.shape[1]
        return self.head(x)


@habit(EQUAL, hard=True)
def shape_of_the_last_batch():
    """A length that is kept at the end of a forward."""
    return Retry()


class Sums(Net):
    """A number that every block adds to, kept on the model, and set back at the start."""

    def forward(self, input_ids):
        self.total = 0
        return super().forward(input_ids) / (1 + 0.01 * self.total)

    def between(self, number, x):
        self.total += number
        return x * (1 + 0.01 * self.total)


@habit(EQUAL)
def running_sum_set_back():
    """State that begins anew in every forward."""
    return Sums()
