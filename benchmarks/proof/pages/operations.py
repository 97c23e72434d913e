"""What happens to tensors on their way: in place, checkpointed, by Functions of one's own, in other types."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.pages.edges import AGAIN
from proof.scene import DEPTH, WIDTH, Block, Net, Padded


class Stream(Net):
    """The residual stream is changed in place by the model: blocks give what is to be added."""

    def forward(self, input_ids):
        x = self.embed(input_ids).clone()
        for block in self.blocks:
            x += 0.5 * torch.tanh(block.mix(x.clone()))
            x.mul_(0.99)
        return self.head(x)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.mix(x))


class AddsInPlace(Net):
    """x += block(x) in the model's own code."""

    def __init__(self):
        super().__init__(Branch)

    def forward(self, input_ids):
        x = self.embed(input_ids).clone()
        for block in self.blocks:
            x += block(x.clone())
        return self.head(x)


@habit(EQUAL)
def stream_added_to_in_place():
    """x += block(x.clone()) in the model's code."""
    return AddsInPlace()


@habit(OR_REFUSED)
def inner_parts_of_blocks_called():
    """The model calls block.mix and never block itself, and changes the stream in place."""
    return Stream()


class Preallocated(Net):
    """All blocks' outputs go into one tensor, made before, and are weighed at the end (ELMo)."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(DEPTH))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        kept = x.new_empty(DEPTH, *x.shape)
        for number, block in enumerate(self.blocks):
            x = block(x)
            kept[number] = x
        return self.head(torch.einsum("l,lbtd->btd", self.weights.softmax(0), kept))


@habit(EQUAL)
def outputs_written_into_one_tensor():
    """kept[number] = x behind every block, into new_empty."""
    return Preallocated()


class OutArgument(Block):
    """A buffer for what the forward computes without a graph, by out=."""

    def __init__(self):
        super().__init__()
        self.register_buffer("room", torch.empty(0), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            if self.room.shape != x.shape:
                self.room = torch.empty_like(x)
            torch.mul(x, 0.1, out=self.room)
        return super().forward(x) + self.room


@habit(EQUAL, hard=True)
def room_for_out_arguments():
    """out= into a scratch buffer that grows with the batch."""
    return Net(OutArgument)


class Reentrant(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@habit(EQUAL)
def reentrant_checkpoint_inside_blocks():
    """The old kind of checkpoint, within every block."""
    return Net(Reentrant)


class Halves(Block):
    def __init__(self):
        super().__init__()
        self.drop, self.other = nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)

    def second(self, x, *, gain):
        return self.drop(self.other(x).tanh()) * gain

    def forward(self, x):
        x = super().forward(x)
        return x + checkpoint(self.second, x, gain=0.5, use_reentrant=False, preserve_rng_state=True)


@habit(EQUAL, draws=True)
def half_of_a_block_checkpointed():
    """Dropout in what is checkpointed, a keyword beside it."""
    return Net(Halves)


class Lower(Block):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.mix(x)
        return x + torch.tanh(y.float())


@habit(EQUAL)
def autocast_inside_blocks():
    """bf16 in every block, float32 between."""
    return Net(Lower)


class Upcast(Block):
    def forward(self, x):
        y = x.double()
        y = y / y.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        with torch.autocast("cpu", enabled=False):
            return super().forward(y.to(x.dtype)).to(torch.float64)


class Types(Net):
    def between(self, number, x):
        return x.float() if number == DEPTH - 1 else x

    def forward(self, input_ids):
        x = self.embed(input_ids).double()
        for number, block in enumerate(self.blocks):
            x = self.between(number, block(x.float()))
        return self.head(x)


@habit(EQUAL)
def float64_between_blocks():
    """Blocks compute in float32 and give float64."""
    return Types(Upcast)


class Straight(torch.autograd.Function):
    """Straight through a rounding, clipped by what it saved."""

    @staticmethod
    def forward(ctx, x, step):
        ctx.save_for_backward(x)
        ctx.step = step
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 100 * ctx.step), None


class Quantized(Block):
    """Quantization aware: weights and activations rounded, a step from the weights' largest."""

    def forward(self, x):
        step = self.mix.weight.detach().abs().max() / 127
        weight = Straight.apply(self.mix.weight, step)
        return x + torch.tanh(F.linear(Straight.apply(x, 0.01), weight, self.mix.bias))


@habit(EQUAL)
def straight_through():
    """A Function of one's own that saves tensors and keeps a number, on weights and activations."""
    return Net(Quantized)


class Between(Net):
    def between(self, number, x):
        return x + 0.1 * Straight.apply(x, 0.05)


@habit(EQUAL)
def straight_through_between_blocks():
    """The same in the model's own code."""
    return Between()


class Standardised(Block):
    """Weight standardisation in the forward, with a learnt gain."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x):
        w = self.mix.weight
        w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) * math.sqrt(WIDTH) + 1e-4) * self.gain
        return x + torch.tanh(F.linear(x, w, self.mix.bias))


@habit(EQUAL)
def weights_standardised():
    """Weights are normalized in every forward."""
    return Net(Standardised)


class Patched(Block):
    """The weight is replaced by a computed one for a call, and put back (del, setattr)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.mix_v = nn.Parameter(self.mix.weight.detach().clone())
        del self.mix._parameters["weight"]

    def forward(self, x):
        self.mix.weight = self.mix_v * self.scale
        return super().forward(x)


@habit(EQUAL)
def weight_as_a_plain_attribute():
    """The old trick: the parameter is deleted, and the forward assigns a tensor in its place."""
    return Net(Patched)


class Reattached(Net):
    """Truncated: the stream goes on detached, and comes back by its own difference."""

    def between(self, number, x):
        return x + 0.5 * (x.detach() - x) if number == 1 else x


@habit(EQUAL)
def detached_and_reattached():
    """x + 0.5 (x.detach() - x) at a border."""
    return Reattached()


class Heads(Block):
    """Heads by view and permute, with the batch's size and length from the shape, and a mask."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return super().forward(y.transpose(1, 2).reshape(b, t, d))


class Masked(Net):
    def forward(self, input_ids, attention_mask):
        x, t = self.embed(input_ids), input_ids.shape[1]
        mask = attention_mask[:, None, None, :].bool() & torch.ones(t, t, dtype=torch.bool).tril()
        if mask.all():
            mask = None
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@habit(EQUAL, data=Padded)
def mask_left_out_where_all_is_true():
    """Attention by heads, whose mask is None where no row of the batch is padded."""
    return Masked(Heads)


class Unpads(Net):
    """Rows of a batch are sorted by length, and put back."""

    def forward(self, input_ids, attention_mask):
        order = attention_mask.sum(1).argsort(descending=True, stable=True)
        x = self.embed(input_ids[order])
        for block in self.blocks:
            x = block(x)
        return self.head(x)[order.argsort()]


@habit(EQUAL, data=Padded)
def rows_sorted_by_length():
    """argsort before the blocks, and its inverse behind the head."""
    return Unpads()


class Patches(Net):
    """Tokens are folded by two, as patches, and unfolded."""

    def __init__(self):
        super().__init__()
        self.fold, self.unfold = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        x = self.fold(x.unflatten(1, (-1, 2)).flatten(2))
        for block in self.blocks:
            x = block(x)
        return self.head(self.unfold(x).unflatten(2, (2, -1)).flatten(1, 2)[:, : input_ids.shape[1]])


@habit(EQUAL)
def tokens_folded():
    """Two tokens become one before the blocks."""
    return Patches()


class Registers(Net):
    """Register tokens in front, expanded to the batch, cut off at the end; a class token returned."""

    def __init__(self):
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, 2, WIDTH) * 0.02)
        self.places = nn.Parameter(torch.zeros(1, 16, WIDTH))

    def forward(self, input_ids):
        x = torch.cat((self.registers.expand(len(input_ids), -1, -1), self.embed(input_ids)), 1)
        x = x + self.places[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 2:])


@habit(EQUAL)
def registers_in_front():
    """Two parameters of the model's own, before the blocks."""
    return Registers()


class Hyper(nn.Module):
    """One network makes the weights of a block's mixing from a learnt code."""

    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, WIDTH * WIDTH)

    def forward(self, x):
        weight = self.make(self.code).view(WIDTH, WIDTH)
        return x + torch.func.functional_call(nn.Linear(WIDTH, WIDTH, bias=False, device="meta"), {"weight": weight}, x)


@habit(EQUAL)
def weights_made_by_a_network():
    """A linear that is made on meta in the forward is called with computed weights."""
    return Net(Hyper)


class Jacobian(Block):
    """A penalty on the block's own Jacobian, by torch.func, in the block."""

    def forward(self, x):
        y, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        self.slope = tangent.square().mean()
        return y


class SumsSlopes(Net):
    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 0.01 * sum(b.slope for b in self.blocks), logits


@habit(EQUAL)
def jacobians_within_blocks():
    """torch.func.jvp over a block's own forward, and a penalty on it."""
    return SumsSlopes(Jacobian)


class Fixpoint(Block):
    """A deep equilibrium: iterated without a graph until little changes, then once with one."""

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                new = torch.tanh(self.mix(z) * 0.5 + x)
                if (new - z).abs().max().item() < 1e-2:
                    break
                z = new
        return x + torch.tanh(self.mix(z.detach()) * 0.5 + x)


@habit(EQUAL)
def equilibrium_within_blocks():
    """A loop until little changes, within the block, without a graph."""
    return Net(Fixpoint)


class Warns(Block):
    def forward(self, x):
        if x.shape[0] > 1 and not torch.isfinite(x).all():
            raise FloatingPointError("a block was given what is not finite")
        if x.abs().max() > 5:
            warnings.warn("large activations", stacklevel=2)
        return super().forward(x)


@habit(EQUAL)
def blocks_that_check_what_they_are_given():
    """Blocks raise for what is not finite, and warn of what is large."""
    return Net(Warns)


@habit(EQUAL, plan=AGAIN)
def straight_through_under_recompute():
    """Functions of one's own, and the recompute schedule."""
    return Net(Quantized)
