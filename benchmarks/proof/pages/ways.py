"""Ways to train in stages: AdamW, schedules, coded borders, replicas, resuming, evaluation, sampling, recompute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.pages import constructors, containers, effects, state, values
from proof.pages.edges import AGAIN, Dropping, Normed
from proof.scene import VOCABULARY, WIDTH, Block, Net

ADAMW = {"optimizer": {"adamw": {"lr": 0.01, "weight_decay": 0.1}}}
MOMENTUM = {"optimizer": {"sgd": {"lr": 0.02, "momentum": 0.9}}}
SPLIT = {"pipeline_schedule": {"split_backward": {"inner": "one_f_one_b"}}}
BOTH = {"pipeline_schedule": {"split_backward": {"inner": {"recompute": {"inner": "one_f_one_b"}}}}}
GPIPE = {"pipeline_schedule": "gpipe"}
TWICE = {"stages": 2, "replicas": 2}
EIGHT_BITS = {"activation_compression": {"codec": {"codec": "int8"}}}
LOSSLESS = {"activation_compression": {"codec": {"codec": "lossless"}}}


def tied(block=Block, vocabulary=VOCABULARY):
    net = Net(block, vocabulary)
    net.head.weight = net.embed.weight
    return net


@habit(EQUAL, train=ADAMW)
def adamw_plain():
    """AdamW."""
    return Net()


@habit(EQUAL, train=ADAMW)
def adamw_tied():
    """AdamW and a tied head."""
    return tied()


@habit(EQUAL, hard=True, train=ADAMW)
def adamw_clones():
    """AdamW and deep copies."""
    return constructors.clones()


@habit(EQUAL, hard=True, train=ADAMW)
def adamw_adapters():
    """AdamW on adapters, all else frozen."""
    return constructors.adapters_from_singular_vectors()


@habit(EQUAL, hard=True, train=ADAMW)
def adamw_counter_at_the_end():
    """AdamW and a counter that is raised at the end of the forward."""
    return state.counter_raised_at_the_end()


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(WIDTH, WIDTH)


@habit(OR_REFUSED, train=ADAMW)
def adamw_unused_layer():
    """AdamW and a layer that nobody calls: it does not decay, as it has no gradient."""
    return Unused()


@habit(EQUAL, train=MOMENTUM)
def momentum_tied():
    """Momentum and a tied head."""
    return tied()


@habit(EQUAL, plan=SPLIT)
def split_backward_plain():
    """The split backward."""
    return Net()


@habit(EQUAL, plan=SPLIT)
def split_backward_tied():
    """The split backward and a tied head."""
    return tied()


@habit(EQUAL, plan=SPLIT, draws=True)
def split_backward_dropout():
    """The split backward and dropout."""
    return Net(Dropping)


@habit(EQUAL, hard=True, plan=SPLIT)
def split_backward_counters():
    """The split backward and counters that blocks return."""
    return values.counter_returned()


@habit(EQUAL, hard=True, plan=SPLIT)
def split_backward_hooks():
    """The split backward and hooks on what blocks give."""
    from proof.pages.edges import Halves

    return Halves()


@habit(EQUAL, hard=True, plan=SPLIT)
def split_backward_encoder():
    """The split backward and nn.TransformerEncoder."""
    return containers.transformer_encoder()


@habit(EQUAL, plan=BOTH, draws=True)
def split_backward_and_recompute():
    """Both around each other, with dropout."""
    return Net(Dropping)


@habit(EQUAL, plan=GPIPE)
def gpipe_tied():
    """All forwards, then all backwards, a tied head."""
    return tied()


@habit(EQUAL, hard=True, plan=GPIPE)
def gpipe_counter_at_the_end():
    """All forwards, then all backwards, and a counter of the model."""
    return state.counter_raised_at_the_end()


@habit(EQUAL, plan=AGAIN, train=ADAMW)
def recompute_tied():
    """Recompute, AdamW, a tied head."""
    return tied()


@habit(EQUAL, hard=True, plan=AGAIN)
def recompute_encoder():
    """Recompute and nn.TransformerEncoder."""
    return containers.transformer_encoder()


@habit(OR_REFUSED, hard=True, plan=AGAIN)
def recompute_iterator():
    """Recompute, and blocks that take their gains from an iterator."""
    return effects.next_of_an_iterator()


@habit(OR_REFUSED, plan=LOSSLESS)
def borders_of_no_fixed_size():
    """A codec that nobody can make room for: as long as the numbers make it."""
    return tied()


@habit(EQUAL, plan=EIGHT_BITS, tolerance=2e-2, alone=False)
def eight_bits_at_borders():
    """Borders in int8: near what one process gives."""
    return Net()


@habit(EQUAL, plan=EIGHT_BITS, tolerance=2e-2, alone=False)
def eight_bits_and_masks():
    """Borders in int8, over which integers and masks cross, too."""
    from proof.pages.edges import GivesTwo

    return ReadsAll(GivesTwo)


class ReadsAll(Net):
    def between(self, number, x):
        return x[0] + 0.05 * F.one_hot(x[1], WIDTH) + 0.05 * x[2]


@habit(EQUAL, **TWICE)
def replicas_plain():
    """Two replicas of two stages."""
    return Net()


@habit(EQUAL, train=ADAMW, **TWICE)
def replicas_tied():
    """Two replicas, AdamW, a tied head."""
    return tied()


@habit(EQUAL, draws=True, **TWICE)
def replicas_dropout():
    """Two replicas and dropout, keyed by the sample."""
    return Net(Dropping)


@habit(EQUAL, apart=True, **TWICE)
def replicas_batch_norm():
    """Two replicas and running statistics, which are of another half of the batch on each."""
    return Net(Normed)


@habit(EQUAL, hard=True, apart=True, **TWICE)
def replicas_counter():
    """Two replicas, whose blocks count their calls: each sees half of them."""
    return values.counter_returned()


@habit(EQUAL, hard=True, apart=True, **TWICE)
def replicas_counter_of_the_model():
    """Two replicas of a model that counts its forwards."""
    return state.counter_raised_at_the_end()


@habit(EQUAL, hard=True, apart=True, **TWICE)
def replicas_memory():
    """Two replicas of a model whose blocks keep the mean of the last micro-batch."""
    return effects.last_activations_of_a_block()


@habit(EQUAL, hard=True, **TWICE)
def replicas_clones():
    """Two replicas of deep copies."""
    return constructors.clones()


@habit(EQUAL, hard=True, **TWICE)
def replicas_teacher():
    """Two replicas with a frozen teacher."""
    return constructors.frozen_teacher()


@habit(EQUAL, apart=True, **TWICE)
def replicas_buffer_counter():
    """Two replicas with a counter in a buffer."""
    return state.counter_in_a_buffer()


@habit(EQUAL, stopped=2, alone=False, train=ADAMW)
def resumed_tied():
    """Stopped after two steps and resumed, AdamW, a tied head."""
    return tied()


@habit(EQUAL, stopped=2, alone=False, draws=True)
def resumed_dropout():
    """Resumed with dropout."""
    return Net(Dropping)


@habit(EQUAL, hard=True, stopped=2, alone=False)
def resumed_clones():
    """Resumed with deep copies."""
    return constructors.clones()


@habit(EQUAL, stopped=2, alone=False)
def resumed_batch_norm():
    """Resumed with running statistics."""
    return Net(Normed)


@habit(EQUAL, hard=True, stopped=2, alone=False)
def resumed_copied_head():
    """Resumed with a head that began as the embedding."""
    return constructors.head_copied_from_embedding()


@habit(EQUAL, hard=True, stopped=2, alone=False)
def resumed_generator():
    """Resumed with weights from a generator of the constructor's own."""
    return constructors.generator_of_its_own()


@habit(OR_REFUSED, hard=True, stopped=2, alone=False)
def resumed_counter():
    """Resumed where blocks count their calls: from 0 again, as a state_dict has no counters."""
    return values.counter_returned()


@habit(EQUAL, text="the cat ")
def looked_at_plain(vocab_size: int = VOCABULARY):
    """Trained on text, evaluated twice, and sampled from."""
    return Causal(vocabulary=vocab_size)


class Causal(Net):
    """Mixes tokens with those before them."""

    def between(self, number, x):
        return x + 0.5 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@habit(EQUAL, text="a dog ", train=ADAMW)
def looked_at_tied(vocab_size: int = VOCABULARY):
    """The same, AdamW, a tied head."""
    net = Causal(vocabulary=vocab_size)
    net.head.weight = net.embed.weight
    return net


@habit(EQUAL, text="a dog ", draws=True)
def looked_at_dropout(vocab_size: int = VOCABULARY):
    """Dropout, which evaluation does without."""
    return Causal(Dropping, vocab_size)


@habit(EQUAL, text="a dog ")
def looked_at_batch_norm(vocab_size: int = VOCABULARY):
    """Running statistics, which evaluation reads."""
    return Causal(Normed, vocab_size)


class CountsTraining(Block):
    n = 0

    def forward(self, x):
        if self.training:
            self.n += 1
        return super().forward(x), self.n


class ReadsTraining(Causal):
    def between(self, number, x):
        return super().between(number, x[0] * (1 + 0.02 * x[1]))


@habit(OR_REFUSED, hard=True, text="a dog ")
def looked_at_counter(vocab_size: int = VOCABULARY):
    """Blocks count their calls in training, and return the number in evaluation, too."""
    return ReadsTraining(CountsTraining, vocab_size)


class CountsAll(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids) * (1 + 0.02 * self.n)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True, text="a dog ")
def looked_at_counter_of_the_model(vocab_size: int = VOCABULARY):
    """The model counts its forwards in training, and reads the number in evaluation."""
    return CountsAll(vocabulary=vocab_size)


@habit(EQUAL, hard=True, text="the cat ")
def looked_at_clones(vocab_size: int = VOCABULARY):
    """Deep copies, evaluated and sampled from."""
    net = Causal(vocabulary=vocab_size)
    net.blocks = constructors.clones().blocks
    return net


class OtherInEvaluation(Causal):
    """Evaluation takes another way through the code."""

    def forward(self, input_ids):
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.training else x + 0.1 * first)


@habit(EQUAL, text="the cat ")
def looked_at_other_edges(vocab_size: int = VOCABULARY):
    """A skip that only evaluation has."""
    return OtherInEvaluation(vocabulary=vocab_size)


@habit(EQUAL, text="the cat ", **TWICE)
def looked_at_replicas(vocab_size: int = VOCABULARY):
    """Two replicas, evaluated and sampled from."""
    return Causal(vocabulary=vocab_size)


@habit(EQUAL, text="the cat ", plan=SPLIT, train=ADAMW)
def looked_at_split_backward(vocab_size: int = VOCABULARY):
    """The split backward, AdamW, evaluated and sampled from."""
    return Causal(vocabulary=vocab_size)
