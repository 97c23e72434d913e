"""Constructors that compute with parameters: copies, averages, numbers read from weights, forwards before training."""

from __future__ import annotations

import copy
import io
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import DEPTH, VOCABULARY, WIDTH, Block, Net


@habit(EQUAL, hard=True)
def head_copied_from_embedding():
    """The head begins as the embedding, and is trained by itself."""
    net = Net()
    net.head.weight.data.copy_(net.embed.weight.data)
    return net


@habit(EQUAL, hard=True)
def block_loaded_from_another():
    """The last block begins with the weights of the first."""
    net = Net()
    net.blocks[3].load_state_dict(net.blocks[0].state_dict())
    return net


@habit(EQUAL, hard=True)
def halves_of_another():
    """load_state_dict of computed values."""
    net = Net()
    net.blocks[2].load_state_dict({name: value * 0.5 for name, value in net.blocks[1].state_dict().items()})
    return net


@habit(EQUAL, hard=True)
def scaled_by_the_norm_of_another():
    """The head is made as large as the embedding."""
    net = Net()
    with torch.no_grad():
        net.head.weight.mul_(net.embed.weight.norm() / net.head.weight.norm() * 0.3)
    return net


class Gained(Block):
    def __init__(self, like=None):
        super().__init__()
        self.gain = 1.0 if like is None else 1 + float(like.mix.weight.abs().mean())

    def forward(self, x):
        return super().forward(x) * self.gain


@habit(EQUAL, hard=True)
def number_read_from_weights():
    """A block keeps a Python float that it reads from another block's weights."""
    net = Net()
    net.blocks[2] = Gained(net.blocks[0])
    net.blocks[3] = Gained(net.blocks[2])
    return net


@habit(EQUAL, hard=True)
def frozen_copy():
    """The last block is a frozen copy of the first."""
    net = Net()
    net.blocks[3] = copy.deepcopy(net.blocks[0]).requires_grad_(False)
    return net


@habit(EQUAL, hard=True)
def clones():
    """All blocks are deep copies of one, as torch's own encoders make them."""
    block, net = Block(), Net()
    net.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(DEPTH))
    return net


class Taught(Net):
    """Its loss is the cross-entropy, and how far it is from a frozen copy of itself as it began."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(nn.ModuleList([self.embed, *self.blocks])).requires_grad_(False)
        with torch.no_grad():
            for param in self.blocks.parameters():
                param.mul_(1.1)

    def forward(self, input_ids, labels):
        x = y = input_ids
        for mine, known in zip([self.embed, *self.blocks], self.teacher, strict=False):
            x, y = mine(x), known(y)
        logits = self.head(x)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": own + F.mse_loss(x, y), "logits": logits}


@habit(EQUAL, hard=True)
def frozen_teacher():
    """Distillation from a frozen deep copy, all in one module."""
    return Taught()


@habit(EQUAL, hard=True)
def generator_of_its_own():
    """All weights are drawn from a generator that the constructor makes."""
    net, draw = Net(), torch.Generator().manual_seed(7)
    for param in net.parameters():
        nn.init.normal_(param, 0, 0.2, generator=draw)
    return net


@habit(EQUAL, hard=True)
def matrices_from_a_generator_of_its_own():
    """Matrices alone, by torch.randn, put in as data."""
    net, draw = Net(), torch.Generator().manual_seed(11)
    for param in net.parameters():
        if param.ndim > 1:
            param.data = torch.randn(param.shape, generator=draw) * 0.2
    return net


@habit(EQUAL, hard=True)
def average_of_blocks():
    """The last block is the mean of the others (a soup)."""
    net = Net()
    with torch.no_grad():
        net.blocks[3].mix.weight.copy_(torch.stack([b.mix.weight for b in net.blocks[:3]]).mean(0))
    return net


@habit(EQUAL, hard=True)
def unit_variance_layer_by_layer():
    """LSUV: forwards in the constructor, until what every block adds has a variance of one."""
    net, draw = Net(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        x = net.embed(torch.randint(VOCABULARY, (4, 8), generator=draw))
        for block in net.blocks:
            block.mix.weight.div_(block.mix(x).std())
            x = block(x)
    return net


@habit(EQUAL, hard=True)
def parameter_made_of_the_old_one():
    """Weights are replaced by new parameters, computed from them."""
    net = Net()
    for block in net.blocks:
        block.mix.weight = nn.Parameter(block.mix.weight.detach() * 0.5)
    return net


@habit(EQUAL, hard=True)
def pieces_of_one_matrix():
    """One orthogonal matrix is drawn, and every block gets some of its rows."""
    net = Net()
    rows = nn.init.orthogonal_(torch.empty(WIDTH * DEPTH, WIDTH * DEPTH))
    for number, block in enumerate(net.blocks):
        block.mix.weight = nn.Parameter(rows[number * WIDTH : (number + 1) * WIDTH, :WIDTH].clone())
    return net


class Slices(nn.Module):
    """All blocks' weights are slices of one parameter."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.big = nn.Parameter(torch.randn(DEPTH, WIDTH, WIDTH) * 0.2)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for weight, norm in zip(self.big, self.norms, strict=False):
            x = norm(x + torch.tanh(x @ weight))
        return self.head(x)


@habit(OR_REFUSED, hard=True)
def slices_of_one_parameter():
    """The model's own code multiplies with slices of a parameter of its own, between norms that are blocks."""
    return Slices()


class Whitened(Block):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.register_buffer("basis", torch.linalg.svd(self.mix.weight)[0] * 1.1)

    def forward(self, x):
        return super().forward(x @ self.basis)


@habit(EQUAL, hard=True)
def basis_of_the_first_weights():
    """Every block keeps the singular vectors of its first weight."""
    return Net(Whitened)


class Rounded(Block):
    def __init__(self):
        super().__init__()
        weight = self.mix.weight.detach()
        self.register_buffer("step", weight.abs().max() / 127)
        self.register_buffer("rounded", (weight / self.step).round().to(torch.int8))

    def forward(self, x):
        return super().forward(x) + 0.1 * F.linear(x, self.rounded.float() * self.step)


@habit(EQUAL, hard=True)
def eight_bit_copies():
    """Every block keeps its first weight in int8, and adds what that gives."""
    return Net(Rounded)


@habit(OR_REFUSED, hard=True)
def tied_by_data():
    """head.weight.data = embed.weight.data: two parameters in one memory."""
    net = Net()
    net.head.weight.data = net.embed.weight.data
    return net


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.LazyLinear(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


@habit(OR_REFUSED, hard=True)
def lazy_layers():
    """nn.LazyLinear in blocks; a forward in the constructor makes their weights."""
    net = Net(Lazy)
    with torch.no_grad():
        net(torch.ones(1, 2, dtype=torch.long))
    return net


class Adapted(nn.Module):
    """W + B A with W frozen, and A, B of W's singular vectors, taken out of it (PiSSA)."""

    def __init__(self, inner, rank=2):
        super().__init__()
        u, s, v = torch.linalg.svd(inner.weight.detach())
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(s[:rank].sqrt()[:, None] * v[:rank])
        self.up = nn.Parameter(u[:, :rank] * s[:rank].sqrt())
        self.inner.weight.data -= self.up.detach() @ self.down.detach()

    def forward(self, x):
        return self.inner(x) + x @ self.down.T @ self.up.T


@habit(EQUAL, hard=True)
def adapters_from_singular_vectors():
    """Linears of a finished model are replaced by adapters computed from them."""
    net = Net().requires_grad_(False)
    for block in net.blocks:
        block.mix = Adapted(block.mix)
    return net


@habit(EQUAL)
def orthogonal_initializer():
    """nn.init.orthogonal_, and a gain."""
    net = Net()
    for block in net.blocks:
        nn.init.orthogonal_(block.mix.weight, gain=0.8)
    return net


@habit(EQUAL)
def scaled_by_depth():
    """As GPT-2: apply, and residual projections scaled by the depth."""
    net = Net()
    net.apply(lambda m: nn.init.normal_(m.weight, 0, 0.1) if isinstance(m, (nn.Linear, nn.Embedding)) else None)
    for name, param in net.named_parameters():
        if name.endswith("mix.weight"):
            nn.init.trunc_normal_(param, 0, 0.1 / math.sqrt(2 * DEPTH))
    return net


@habit(EQUAL)
def numpy_draws():
    """Weights from numpy's generators, the global one and one of its own."""
    net, own = Net(), np.random.default_rng(4)
    for block in net.blocks:
        block.mix.weight.data.copy_(torch.from_numpy(np.random.randn(WIDTH, WIDTH).astype(np.float32) * 0.2))
        block.mix.bias.data.copy_(torch.from_numpy(own.normal(size=WIDTH).astype(np.float32)))
    return net


@habit(EQUAL)
def gains_by_random():
    """Python's random decides a gain of every block."""
    net = Net(Gained)
    for block in net.blocks:
        block.gain = random.uniform(0.9, 1.1)
    return net


@habit(EQUAL, hard=True)
def grown_from_a_shallow_net():
    """Blocks 2 and 3 are blocks 0 and 1 with noise, as nets are grown."""
    net = Net()
    with torch.no_grad():
        for old, new in zip(net.blocks[:2], net.blocks[2:], strict=False):
            for a, b in zip(old.parameters(), new.parameters(), strict=False):
                b.copy_(a + 0.01 * torch.randn_like(a))
    return net


@habit(EQUAL, hard=True)
def drawn_again_until_small():
    """Initialized again until the norm is what the author wants."""
    net = Net()
    for block in net.blocks:
        while float(block.mix.weight.norm()) > 2.3:
            block.mix.reset_parameters()
    return net


@habit(EQUAL, hard=True)
def branch_on_a_weight():
    """The constructor looks at a weight to decide what to do with another one."""
    net = Net()
    if net.embed.weight.std() > 0.5:
        net.head.weight.data *= 0.25
    return net


class Anchored(Net):
    """L2-SP: how far it is from where it began is part of its loss."""

    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.blocks):
            self.register_buffer(f"first_{number}", block.mix.weight.detach().clone() * 0.5)

    def forward(self, input_ids, labels):
        logits = super().forward(input_ids)
        far = sum((b.mix.weight - getattr(self, f"first_{i}")).square().sum() for i, b in enumerate(self.blocks))
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return own + 0.01 * far, logits


@habit(OR_REFUSED, hard=True)
def penalty_on_the_way_from_the_start():
    """Buffers hold what the weights began as; the loss reads the weights of all blocks."""
    return Anchored()


class Calibrated(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        return super().forward(x - self.mean)


@habit(EQUAL, hard=True)
def calibrated_before_training():
    """Means of activations, from a forward over samples in the constructor, in buffers."""
    net = Net(Calibrated)
    with torch.no_grad():
        x = net.embed(torch.arange(1, 25).view(4, 6))
        for block in net.blocks:
            block.mean.copy_(x.mean((0, 1)))
            x = block(x)
    return net


@habit(EQUAL, hard=True)
def read_from_a_checkpoint():
    """Another net of the same kind is saved to bytes and loaded, but for its head."""
    held = io.BytesIO()
    torch.save(Net().state_dict(), held)
    held.seek(0)
    net = Net()
    net.load_state_dict({n: v for n, v in torch.load(held).items() if not n.startswith("head")}, strict=False)
    return net


@habit(EQUAL, hard=True)
def all_as_one_vector():
    """All parameters as one vector, normalized, and put back."""
    net = Net()
    vector = parameters_to_vector(net.parameters()).detach()
    vector_to_parameters(vector / vector.norm() * 12, net.parameters())
    return net


@habit(EQUAL)
def symmetric_weights():
    """Every weight is made symmetric, in place."""
    net = Net()
    with torch.no_grad():
        for block in net.blocks:
            block.mix.weight.copy_((block.mix.weight + block.mix.weight.T) / 2)
    return net


@habit(EQUAL)
def seeded_by_itself():
    """torch.manual_seed in the constructor."""
    torch.manual_seed(1234)
    return Net()


@habit(EQUAL, hard=True)
def pruned():
    """torch.nn.utils.prune: masks from the size of weights, and hooks that apply them."""
    net = Net()
    for block in net.blocks:
        prune.l1_unstructured(block.mix, "weight", amount=0.3)
    return net


class Shadowed(Block):
    """Keeps a moving average of its own weight, and mixes it in."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shadow", self.mix.weight.detach().clone())

    def forward(self, x):
        if self.training:
            self.shadow.lerp_(self.mix.weight.detach(), 0.1)
        return super().forward(x) + 0.1 * F.linear(x, self.shadow)


@habit(OR_REFUSED, hard=True)
def average_of_weights_in_the_forward():
    """An EMA of a block's weight, that begins as the weight and is used by the block."""
    return Net(Shadowed)


class Momentum(Net):
    """MoCo: a second encoder follows the first by a moving average, made in the forward."""

    def __init__(self):
        super().__init__()
        self.slow = copy.deepcopy(self.blocks).requires_grad_(False)

    def forward(self, input_ids, labels):
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.slow.parameters(), self.blocks.parameters(), strict=False):
                    mine.lerp_(theirs, 0.2)
        x = y = self.embed(input_ids)
        for block, slow in zip(self.blocks, self.slow, strict=False):
            x, y = block(x), slow(y)
        logits = self.head(x)
        own = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return own - 0.1 * F.cosine_similarity(x, y.detach(), dim=-1).mean(), logits


@habit(OR_REFUSED, hard=True)
def momentum_encoder():
    """A deep copy is updated from the trained blocks in every forward."""
    return Momentum()


@habit(EQUAL, hard=True)
def wider_than_before():
    """Net2Wider: a smaller net's weights are put into the corner of this one's."""
    small, net = nn.Linear(8, 8), Net()
    with torch.no_grad():
        for block in net.blocks:
            block.mix.weight[:8, :8] = small.weight
            block.mix.bias[:8] = small.bias
    return net


@habit(EQUAL, hard=True)
def head_that_undoes_the_embedding():
    """The head is the pseudo-inverse of the embedding."""
    net = Net()
    net.head.weight = nn.Parameter(torch.linalg.pinv(net.embed.weight.detach()).T.contiguous())
    return net


_PRETRAINED = {}


def pretrained():
    """A net that is made once and kept, as a hub does."""
    if "net" not in _PRETRAINED:
        _PRETRAINED["net"] = Net()
    return _PRETRAINED["net"]


@habit(EQUAL, hard=True)
def from_a_hub():
    """Copies blocks of a net that a module-level cache holds."""
    net = Net()
    net.blocks = copy.deepcopy(pretrained().blocks)
    return net


@habit(EQUAL, hard=True)
def weights_that_sum_to_zero():
    """An initializer over all blocks at once: their mean is taken from each."""
    net = Net()
    with torch.no_grad():
        mean = sum(block.mix.weight for block in net.blocks) / DEPTH
        for block in net.blocks:
            block.mix.weight.sub_(mean)
    return net
