"""Borders between blocks: edges of some batches, hooks, one memory under two names, ties, generators, checkpoints."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import VOCABULARY, WIDTH, Block, Net

AGAIN = {"pipeline_schedule": {"recompute": {"inner": "one_f_one_b"}}}


class DetachedFirst(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return y.detach() if self.n <= 3 else y


@habit(OR_REFUSED, hard=True)
def detached_for_three_calls():
    """A block gives its output without a graph at first."""
    return Net(DetachedFirst)


class DetachedLater(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        y = super().forward(x)
        return y.detach() if self.n > 8 else y


@habit(EQUAL, late=True)
def detached_in_the_third_step():
    """The other way round."""
    return Net(DetachedLater)


class DetachedByToken(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and input_ids[0, 0] % 2:
                x = x.detach()
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def detached_by_a_token():
    """The batch's first token decides whether the lower half gets a gradient."""
    return DetachedByToken()


class GivesTwo(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().argmax(-1), y.detach() > 0.5


class ReadsSome(Net):
    """An integer tensor of the first block is read at the end in some batches."""

    n = 0

    def forward(self, input_ids):
        x, largest, _ = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x = block(x)[0]
        self.n += 1
        if self.is_read(input_ids):
            x = x + F.one_hot(largest, WIDTH) * 0.5
        return self.head(x)

    def is_read(self, input_ids):
        return self.n > 2


@habit(OR_REFUSED, hard=True)
def integers_read_by_a_counter():
    """From the third micro-batch on."""
    return ReadsSome(GivesTwo)


class ReadsSomeLater(ReadsSome):
    def is_read(self, input_ids):
        return self.n > 9


@habit(OR_REFUSED, hard=True, late=True)
def integers_read_in_the_third_step():
    """From the tenth micro-batch on."""
    return ReadsSomeLater(GivesTwo)


class ReadsByToken(ReadsSome):
    def is_read(self, input_ids):
        return int(input_ids[0, 0]) % 2 == 1


@habit(OR_REFUSED, hard=True)
def integers_read_by_a_token():
    """When the first token is odd."""
    return ReadsByToken(GivesTwo)


class MasksByToken(Net):
    def forward(self, input_ids):
        x, _, mask = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x = block(x)[0]
        if int(input_ids.sum()) % 2:
            x = x.masked_fill(mask, 0.0)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def mask_read_by_a_token():
    """A bool tensor of the first block, read behind the last in some batches."""
    return MasksByToken(GivesTwo)


class Where(Net):
    n = 0

    def forward(self, input_ids):
        x = first = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x = block(x)
        self.n += 1
        return self.head(torch.where(first > 0, x, 0.5 * x) if self.n > 2 else x)


@habit(OR_REFUSED, hard=True)
def comparison_with_an_edge_of_some_batches():
    """A float edge of later batches that only a comparison reads."""
    return Where()


class AddsByToken(Net):
    def forward(self, input_ids):
        x = first = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x + 0.3 * first if input_ids[0, 0] > 10 else x)


@habit(OR_REFUSED, hard=True)
def skip_by_a_token():
    """A long skip in some batches."""
    return AddsByToken()


class Halves(Net):
    def between(self, number, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return x


@habit(EQUAL, hard=True)
def gradient_halved_between_blocks():
    """A tensor hook on what every block gives."""
    return Halves()


class Clips(Net):
    def between(self, number, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (1e-3 / (grad.norm() + 1e-6)).clamp(max=1.0))
        return x


@habit(EQUAL, hard=True)
def gradient_of_activations_clipped():
    """A hook that clips by norm between all blocks."""
    return Clips()


class Retains(Net):
    def between(self, number, x):
        if x.requires_grad:
            x.retain_grad()
        self.kept = x
        return x


@habit(EQUAL)
def gradient_retained():
    """retain_grad between blocks."""
    return Retains()


class Notes(Net):
    """Gradient norms, told by hooks, scale the next batch."""

    norm = 0.0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        x = x * (1 + min(0.2, self.norm))
        if x.requires_grad:
            x.register_hook(self.note)
        return self.head(x)

    def note(self, grad):
        self.norm = 10 * float(grad.norm())


@habit(OR_REFUSED, hard=True)
def gradient_norm_read_in_the_next_forward():
    """A hook keeps a number on the model, which is read in the next forward of the same stage."""
    return Notes()


def _scale(factor):
    return lambda module, inputs, outputs: tuple(None if g is None else g * factor for g in inputs)


@habit(EQUAL, hard=True)
def full_backward_hooks_on_blocks():
    """register_full_backward_hook that scales what goes on."""
    net = Net()
    for block in net.blocks:
        block.register_full_backward_hook(_scale(0.8))
    return net


@habit(EQUAL)
def full_backward_hooks_inside_blocks():
    """The same on the linears in the blocks."""
    net = Net()
    for block in net.blocks:
        block.mix.register_full_backward_hook(_scale(0.8))
    return net


@habit(EQUAL)
def full_backward_pre_hooks():
    """register_full_backward_pre_hook that scales what comes."""
    net = Net()
    for block in net.blocks:
        block.register_full_backward_pre_hook(lambda module, grads: tuple(g * 0.9 for g in grads))
    return net


@habit(EQUAL)
def forward_hooks_that_replace():
    """Forward hooks and pre-hooks that change what goes in and comes out."""
    net = Net()
    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
        block.register_forward_hook(lambda module, args, out: out + 0.05 * args[0])
    return net


@habit(EQUAL)
def gradients_of_parameters_clipped():
    """A hook on every parameter."""
    net = Net()
    for param in net.parameters():
        param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return net


@habit(OR_REFUSED, hard=True)
def tied_weight_with_a_hook():
    """The tied embedding's gradient is clamped, that is the sum of both."""
    net = Net()
    net.head.weight = net.embed.weight
    net.embed.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return net


def clamped(param):
    param.grad.clamp_(-5e-3, 5e-3)


@habit(OR_REFUSED, hard=True)
def tied_weight_accumulated_by_a_hook():
    """register_post_accumulate_grad_hook on a tied weight."""
    net = Net()
    net.head.weight = net.embed.weight
    net.embed.weight.register_post_accumulate_grad_hook(clamped)
    return net


@habit(OR_REFUSED, hard=True)
def shared_block_with_a_hook():
    """One block in two places, with a sign on its gradient."""
    net = Net()
    net.blocks[3] = net.blocks[0]
    net.blocks[0].mix.weight.register_hook(lambda grad: grad.sign() * 1e-3)
    return net


@habit(EQUAL)
def tied_weight():
    """Embedding and head are one parameter."""
    net = Net()
    net.head.weight = net.embed.weight
    return net


@habit(EQUAL)
def one_block_four_times():
    """All blocks are one (ALBERT)."""
    net = Net()
    net.blocks = nn.ModuleList([Block()] * 4)
    return net


@habit(EQUAL)
def two_blocks_by_turns():
    """Weight sharing across every second block."""
    a, b, net = Block(), Block(), Net()
    net.blocks = nn.ModuleList([a, b, a, b])
    return net


@habit(EQUAL)
def linear_shared_by_blocks():
    """Blocks of their own share one linear."""
    net = Net()
    for block in net.blocks[1:]:
        block.mix.weight = net.blocks[0].mix.weight
    return net


class Alias(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y[:, :1]


class Writes(Net):
    def between(self, number, x):
        x[1].mul_(1.5)
        return x[0]


@habit(OR_REFUSED, hard=True)
def written_through_a_view():
    """A block returns a tensor and a view of it; the model writes to the view."""
    return Writes(Alias)


class Twice(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y


class Identical(Net):
    def between(self, number, x):
        return x[0] * (1.2 if x[0] is x[1] else 0.8)


@habit(OR_REFUSED, hard=True)
def the_same_object_twice():
    """A block returns one tensor twice, and the model asks whether it is one."""
    return Identical(Twice)


class Marks(Block):
    def forward(self, x):
        y = super().forward(x)
        y.gain = 1.2
        return y


class ReadsMarks(Net):
    def between(self, number, x):
        return x * getattr(x, "gain", 1.0)


@habit(OR_REFUSED, hard=True)
def attribute_of_a_tensor():
    """A block sets an attribute on what it returns."""
    return ReadsMarks(Marks)


class Strides(Net):
    def between(self, number, x):
        rows = torch.as_strided(x, (x.shape[0], x.shape[1], 1), (x.stride(0), x.stride(1), 1))
        return x + 0.2 * rows


@habit(OR_REFUSED, hard=True)
def as_strided_between_blocks():
    """as_strided of what crosses."""
    return Strides()


class Transposed(Block):
    def forward(self, x):
        return super().forward(x).transpose(1, 2)


class PutsBack(Net):
    def between(self, number, x):
        return x.transpose(1, 2).view(x.shape[0], -1, WIDTH)


@habit(OR_REFUSED, hard=True)
def transposed_output():
    """What crosses is not contiguous, and its transpose is viewed without a copy."""
    return PutsBack(Transposed)


class Split(Block):
    def forward(self, x):
        return super().forward(x).split(WIDTH // 2, -1)


class Joins(Net):
    def between(self, number, x):
        return torch.cat([x[1], x[0] * 0.9], -1)


@habit(EQUAL)
def halves_of_one_tensor():
    """split: views of one memory, read alone."""
    return Joins(Split)


class Expands(Block):
    def forward(self, x):
        return super().forward(x), self.mix.bias.expand(x.shape[0], x.shape[1], WIDTH)


class AddsExpanded(Net):
    def between(self, number, x):
        return x[0] + x[1]


@habit(EQUAL)
def expanded_output():
    """A tensor of stride 0 crosses."""
    return AddsExpanded(Expands)


class Sequential(Net):
    def forward(self, input_ids):
        x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, self.embed(input_ids), use_reentrant=False)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def checkpoint_sequential_over_blocks():
    """Two checkpointed segments of two blocks."""
    return Sequential()


class Checkpoints(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@habit(EQUAL)
def checkpoint_of_every_block():
    """Every block alone, not reentrant."""
    return Checkpoints()


class CountedTurns(Block):
    n = 0

    def forward(self, x):
        self.n += 1
        return super().forward(x) * (1.2 if self.n % 2 else 1.0)


@habit(OR_REFUSED, hard=True, plan=AGAIN)
def counter_that_turns_under_recompute():
    """A block alternates, and the schedule runs its forward twice."""
    return Net(CountedTurns)


class CountedNet(Net):
    n = 0

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x * (1 + 0.01 * self.n))
        self.n += 1
        return self.head(x)


@habit(OR_REFUSED, hard=True, plan=AGAIN)
def counter_of_the_model_under_recompute():
    """A counter of the model's own code, raised at the end."""
    return CountedNet()


class Dropping(Block):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.2, self.training))


@habit(EQUAL, draws=True, plan=AGAIN)
def dropout_under_recompute():
    """Recomputed with the same numbers."""
    return Net(Dropping)


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


@habit(EQUAL)
def batch_norm():
    """Running statistics in every block."""
    return Net(Normed)


@habit(EQUAL, plan=AGAIN)
def batch_norm_under_recompute():
    """Running statistics count once."""
    return Net(Normed)


class Noisy(Net):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)

    def between(self, number, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.draw)


@habit(OR_REFUSED, hard=True)
def generator_of_the_model():
    """Noise between blocks from a torch.Generator of the model's own."""
    return Noisy()


class NoisyBlock(Block):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.draw))


@habit(OR_REFUSED)
def generator_of_every_block():
    """Noise in blocks, each from a generator of its own."""
    return Net(NoisyBlock)


class Lent(Net):
    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList(Borrows(self.draw) for _ in range(4))


class Borrows(Block):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * (1 + 0.1 * torch.rand((), generator=self.draw))


@habit(OR_REFUSED, hard=True)
def generator_shared_by_blocks():
    """All blocks draw from one generator, one after the other."""
    return Lent()


@habit(EQUAL, hard=True)
def blocks_in_a_dict():
    """nn.ModuleDict of blocks, called by name."""
    return Named()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleDict({f"l{number}": Block() for number in range(4)})

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


class Nested(nn.Module):
    """Stages of a net in a dict of lists of dicts."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.parts = nn.ModuleDict(
            {name: nn.ModuleList(nn.ModuleDict({"a": Block(), "b": Block()}) for _ in range(2)) for name in "xy"}
        )

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for part in self.parts.values():
            for pair in part:
                x = pair["a"](x) + 0.1 * pair["b"](x)
        return self.head(x)


@habit(EQUAL)
def dicts_of_lists_of_dicts():
    """Nested ModuleDicts and ModuleLists."""
    return Nested()


class Bound(Net):
    def __init__(self):
        super().__init__()
        self.calls = [block.forward for block in self.blocks]

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for call in self.calls:
            x = call(x)
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def bound_methods_kept():
    """Blocks are called through bound methods that the constructor keeps."""
    return Bound()


class Threads(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            out = []
            thread = threading.Thread(target=lambda b=block, y=x, put=out.append: put(b(y)))
            thread.start()
            thread.join()
            x = out[0]
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def blocks_in_threads():
    """Every block is called in a thread of the model's own."""
    return Threads()


class Penalty(Net):
    """A gradient penalty within the last block's part of the forward."""

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks[:3]:
            x = block(x)
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            out = self.blocks[3](y)
            (grad,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
        logits = self.head(out)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + 0.01 * grad.square().mean(), "logits": logits}


@habit(OR_REFUSED, hard=True)
def gradient_penalty_of_the_last_block():
    """A gradient taken within the forward."""
    return Penalty()


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class Reverses(Net):
    def between(self, number, x):
        return Reversal.apply(x) if number == 1 else x


@habit(EQUAL)
def gradient_reversed_between_blocks():
    """A function of one's own at a border."""
    return Reverses()


class CountsBackwards(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        CountsBackwards.calls += 1
        return grad * (1 + 0.05 * CountsBackwards.calls)


class BackwardState(Net):
    def between(self, number, x):
        return CountsBackwards.apply(x)


@habit(OR_REFUSED, hard=True)
def backwards_that_count():
    """A function of one's own whose backward counts its calls, for all borders together."""
    return BackwardState()


class Changes(Net):
    def between(self, number, x):
        return x.add_(0.1).mul_(0.95)


@habit(EQUAL)
def changed_in_place_between_blocks():
    """The model's code changes what blocks give, in place."""
    return Changes()


class Scripted(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(torch.jit.script(TypedBlock()) for _ in range(4))


class TypedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(x))


@habit(OR_REFUSED, hard=True)
def scripted_blocks():
    """torch.jit.script-ed blocks."""
    return Scripted()


class SparseOut(Block):
    def forward(self, x):
        y = super().forward(x)
        return y, y.detach().relu().to_sparse()


class ReadsSparse(Net):
    def between(self, number, x):
        return x[0] + 0.1 * x[1].to_dense()


@habit(OR_REFUSED, hard=True)
def sparse_output():
    """A sparse tensor crosses."""
    return ReadsSparse(SparseOut)


class Packs(Net):
    """Padding is taken out between blocks: shapes depend on numbers."""

    def forward(self, input_ids):
        keep = input_ids % 5 > 0
        x = self.embed(input_ids)[keep]
        for block in self.blocks:
            x = block(x)
        full = x.new_zeros(*input_ids.shape, WIDTH)
        full[keep] = x
        return self.head(full)


@habit(OR_REFUSED, hard=True)
def padding_taken_out():
    """Blocks see only the tokens that count, another number in every batch."""
    return Packs()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        scores, flat = self.gate(x).softmax(-1), x.flatten(0, 1)
        best, out = scores.argmax(-1).flatten(), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            if len(rows):
                weight = scores.flatten(0, 1)[rows, number, None]
                out = out.index_add(0, rows, (expert(flat[rows]) * weight).to(out.dtype))
        self.load = torch.bincount(best, minlength=3)
        return x + out.view_as(x)


@habit(EQUAL)
def experts_routed_in_python():
    """A mixture of experts in a loop, that keeps its load as an attribute."""
    return Net(Experts)


class Balanced(Net):
    """The model's code reads the load of all layers as numbers."""

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        most = max(int(block.load.max()) for block in self.blocks)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own * (1 + 0.01 * most), "logits": logits}


@habit(OR_REFUSED, hard=True)
def load_of_experts_read_as_numbers():
    """int() of what every layer keeps, in the loss."""
    return Balanced(Experts)


class Two(nn.Module):
    """Two towers of blocks on the same tokens, compared."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.left, self.right = nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, input_ids):
        a = b = self.embed(input_ids)
        for block in self.left:
            a = block(a)
        for block in self.right:
            b = block(b.flip(1))
        return self.head(torch.cat([a, b], -1))


@habit(EQUAL)
def two_towers():
    """Siblings that are joined at the end."""
    return Two()


class Siamese(Net):
    def forward(self, input_ids, labels):
        x = y = self.embed(input_ids)
        for block in self.blocks:
            x, y = block(x), block(y.flip(1))
        logits = self.head(x)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + 0.1 * (x - y.flip(1)).square().mean(), "logits": logits}


@habit(EQUAL)
def siamese():
    """Every block is called twice, with two inputs."""
    return Siamese()


class Positional(nn.Module):
    """A forward of *args and **kwargs."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, *args, **kwargs):
        kwargs.pop("labels", None)
        return self.net(*args, **kwargs)


@habit(EQUAL)
def arguments_passed_on():
    """*args, **kwargs all the way down."""
    return Positional()


class LayerScale(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-2))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.mix(x))


@habit(EQUAL)
def layer_scale():
    """Small gains, as vision models have them."""
    return Net(LayerScale)


class ZeroHead(Net):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.zeros_(block.mix.weight)
            nn.init.zeros_(block.mix.bias)


@habit(EQUAL)
def zero_initialized():
    """The head and all residual branches begin as zeros."""
    return ZeroHead()


class Functional(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            weights = {name: value * 0.9 for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, weights, (x,))
        return self.head(x)


@habit(OR_REFUSED)
def functional_calls():
    """torch.func.functional_call with computed weights."""
    return Functional()


class WeightPenalty(Net):
    """Weight decay by hand, in the loss."""

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + 1e-3 * sum(p.square().sum() for p in self.parameters()), "logits": logits}


@habit(OR_REFUSED, hard=True)
def penalty_on_all_weights():
    """The loss reads the parameters of all stages."""
    return WeightPenalty()


class ReadsWeight(Net):
    def between(self, number, x):
        return x / (1 + 0.01 * self.blocks[0].mix.weight.norm())


@habit(OR_REFUSED, hard=True)
def weight_of_another_block_read():
    """The model's code reads a block's weight everywhere."""
    return ReadsWeight()


class ReadsWeightNumber(Net):
    def between(self, number, x):
        return x / (1 + 0.01 * float(self.blocks[0].mix.weight.detach().norm()))


@habit(OR_REFUSED, hard=True)
def weight_of_another_block_read_as_a_number():
    """The same through float()."""
    return ReadsWeightNumber()


class Debug(Net):
    """Prints and asserts of a careful author."""

    def between(self, number, x):
        assert torch.isfinite(x).all(), f"block {number}"
        return x


@habit(OR_REFUSED)
def asserts_on_activations():
    """`assert torch.isfinite(x).all()` behind every block."""
    return Debug()


class Bounded(Net):
    def between(self, number, x):
        return x * 0.5 if x.abs().max() > 3.0 else x


@habit(OR_REFUSED)
def branch_on_activations():
    """The model halves what has become large."""
    return Bounded()
