"""Habits of other pages under other ways to train: replicas, two and four stages, schedules, resuming, evaluation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.pages import idioms, losses, memories, operations
from proof.pages.edges import AGAIN
from proof.pages.ways import ADAMW, BOTH, GPIPE, SPLIT, TWICE
from proof.scene import VOCABULARY, WIDTH, Block, Net


@habit(EQUAL, stages=2, train=ADAMW)
def adamw_deep_supervision_of_two():
    """Deep supervision, AdamW, two stages."""
    return losses.deep_supervision()


@habit(EQUAL, stages=4, train=ADAMW)
def codebooks_on_four():
    """Codebooks, AdamW, four stages."""
    return memories.codebooks_that_follow()


@habit(EQUAL, stages=4)
def one_side_head_on_four():
    """A side head that is called behind every second block, four stages."""
    return losses.one_side_head_for_all()


@habit(EQUAL, stages=4)
def stream_in_place_on_four():
    """x += block(x) over four stages."""
    return operations.stream_added_to_in_place()


@habit(EQUAL, plan=AGAIN)
def codebooks_under_recompute():
    """Codebooks, whose buffers move once although forwards run twice."""
    return memories.codebooks_that_follow()


@habit(EQUAL, plan=AGAIN)
def queue_under_recompute():
    """A queue of keys at the end, and its place."""
    return memories.queue_of_keys()


@habit(EQUAL, plan=AGAIN)
def past_states_under_recompute():
    """Blocks that keep the states of the last two micro-batches."""
    return memories.keys_of_the_last_two_batches()


@habit(EQUAL, plan=AGAIN, draws=True)
def checkpoint_under_recompute():
    """Half of a block is checkpointed, with dropout, and all of it run again."""
    return operations.half_of_a_block_checkpointed()


@habit(EQUAL, plan=SPLIT)
def split_backward_one_side_head():
    """The split backward, and a head called three times."""
    return losses.one_side_head_for_all()


@habit(EQUAL, plan=SPLIT)
def split_backward_straight_through():
    """The split backward through Functions of one's own."""
    return operations.straight_through()


@habit(EQUAL, hard=True, plan=SPLIT)
def split_backward_reentrant():
    """The split backward through reentrant checkpoints in blocks."""
    return operations.reentrant_checkpoint_inside_blocks()


@habit(EQUAL, plan=SPLIT)
def split_backward_jacobians():
    """The split backward through torch.func.jvp."""
    return operations.jacobians_within_blocks()


@habit(EQUAL, plan=SPLIT)
def split_backward_parametrised():
    """The split backward through a parametrisation with a moving norm."""
    return memories.parametrised_by_a_moving_norm()


@habit(EQUAL, plan=BOTH)
def both_balance_of_experts():
    """The split backward around recompute, and experts."""
    return losses.balance_read_by_a_property()


@habit(EQUAL, plan=GPIPE)
def gpipe_fast_weights():
    """All forwards, then all backwards, and fast weights."""
    return memories.fast_weights()


@habit(EQUAL, plan=GPIPE)
def gpipe_weight_as_an_attribute():
    """All forwards, then all backwards, and weights that are assigned in every forward."""
    return operations.weight_as_a_plain_attribute()


@habit(EQUAL, **TWICE)
def replicas_deep_supervision():
    """Two replicas, and losses of their own."""
    return losses.deep_supervision()


@habit(EQUAL, apart=True, **TWICE)
def replicas_codebooks():
    """Two replicas, each with codebooks that follow its own half."""
    return memories.codebooks_that_follow()


@habit(EQUAL, apart=True, **TWICE)
def replicas_queue():
    """Two replicas, each with a queue of its own keys."""
    return memories.queue_of_keys()


@habit(EQUAL, **TWICE)
def replicas_stream_object():
    """Two replicas of blocks that hand on an object."""
    return idioms.stream_object()


@habit(EQUAL, train=ADAMW, **TWICE)
def replicas_learnt_weights_of_losses():
    """Two replicas, and weights of losses as a parameter."""
    return losses.weights_of_losses_learnt()


@habit(EQUAL, stopped=2)
def resumed_codebooks():
    """Resumed with codebooks."""
    return memories.codebooks_that_follow()


@habit(EQUAL, stopped=2)
def resumed_welford():
    """Resumed with running statistics, one of which is replaced in every forward."""
    return memories.welford_in_blocks()


@habit(EQUAL, stopped=2)
def resumed_queue():
    """Resumed with a queue and its place."""
    return memories.queue_of_keys()


@habit(EQUAL, stopped=2, train=ADAMW)
def resumed_slow_copies():
    """Resumed with untrained copies that move, AdamW."""
    return memories.slow_copy_in_every_block()


class FirstTime(Block):
    """Data-dependent initialization, flagged by a buffer."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if self.training and not self.is_set:
            with torch.no_grad():
                self.gain.copy_(1 / (x.flatten(0, 1).std(0) + 0.1))
            self.is_set.fill_(True)
        return super().forward(x * self.gain)


@habit(EQUAL, stopped=2)
def resumed_set_by_the_first_batch():
    """ActNorm in blocks, by a buffer that a checkpoint keeps."""
    return Net(FirstTime)


class Ensured(Net):
    """get_extra_state keeps a counter in the state_dict."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def forward(self, input_ids):
        self.steps += self.training
        return super().forward(input_ids) / (1 + 0.01 * self.steps)


@habit(OR_REFUSED, hard=True, stopped=2, alone=False)
def resumed_extra_state():
    """A counter by get_extra_state and set_extra_state, which a state_dict keeps."""
    return Ensured()


@habit(EQUAL)
def extra_state():
    """The same, without a break."""
    return Ensured()


@habit(EQUAL, text="the cat ")
def looked_at_rotary(vocab_size: int = VOCABULARY):
    """Rotary tables that evaluation reads at other lengths."""
    rotary = memories.Rotary()
    return Net(lambda: memories.Rotates(rotary), vocab_size)


@habit(EQUAL, text="a dog ")
def looked_at_distances(vocab_size: int = VOCABULARY):
    """Tables of distances by length, which sampling makes more of."""
    return Net(memories.Relative, vocab_size)


@habit(EQUAL, text="the cat ")
def looked_at_welford(vocab_size: int = VOCABULARY):
    """Running statistics of one's own, which evaluation reads."""
    return Net(memories.RunningNorm, vocab_size)


@habit(OR_REFUSED, text="a dog ")
def looked_at_past_states(vocab_size: int = VOCABULARY):
    """Blocks keep the last batch's states in evaluation, too."""
    return Net(Fading, vocab_size)


class Fading(Block):
    """A mean of former batches, by rows that any batch has."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        y = super().forward(x) + 0.1 * self.mean
        if self.training:
            self.mean = x.detach().mean((0, 1))
        return y


class Modes(Net):
    """train() is overridden, so that a frozen block stays in eval mode."""

    def __init__(self, vocabulary):
        super().__init__(Dropping, vocabulary)
        self.blocks[1].requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.blocks[1].eval()
        return self


class Dropping(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(super().forward(x))


@habit(EQUAL, text="the cat ", draws=True)
def looked_at_overridden_train(vocab_size: int = VOCABULARY):
    """train() keeps a frozen block with dropout in eval mode."""
    return Modes(vocab_size)


class Averaged(nn.Module):
    """swa_utils.AveragedModel of a head, which evaluation uses."""

    def __init__(self, vocabulary):
        super().__init__()
        self.net = Net(Block, vocabulary)
        self.slow = copy.deepcopy(self.net.head).requires_grad_(False)

    def forward(self, input_ids):
        x = self.net.embed(input_ids)
        for block in self.net.blocks:
            x = block(x)
        if not self.training:
            return self.slow(x)
        logits = self.net.head(x)
        with torch.no_grad():
            for a, b in zip(self.slow.parameters(), self.net.head.parameters(), strict=True):
                a.copy_(0.5 * a + 0.5 * b)
        return logits


@habit(OR_REFUSED, text="a dog ")
def looked_at_averaged_head(vocab_size: int = VOCABULARY):
    """Evaluation uses a slow copy of the head, which training never calls."""
    return Averaged(vocab_size)


class Normed(Net):
    """A net within a net: an encoder and a decoder, each with blocks of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "norm": nn.LayerNorm(WIDTH)})
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, input_ids):
        seen = self.embed(input_ids)
        for block in self.encoder["blocks"]:
            seen = block(seen)
        seen = self.encoder["norm"](seen)
        x = self.embed(input_ids.roll(1, 1))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                x = x + F.softmax(x @ seen.mT, -1) @ self.cross[number // 2](seen)
        return self.head(x)


@habit(EQUAL, stages=4)
def encoder_and_decoder_of_ones_own():
    """An embedding for both, lists of blocks in a dict, crossings in the model's code."""
    return Normed()


@habit(EQUAL, stages=2, plan=SPLIT, train=ADAMW)
def split_backward_encoder_and_decoder():
    """The same, with the split backward, AdamW, two stages."""
    return Normed()


@habit(EQUAL, stages=2)
def exits_on_two():
    """One head behind every block, two stages."""
    return losses.exits_through_one_head()
