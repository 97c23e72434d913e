"""What modules remember in tensors: queues, codebooks, teachers, caches of positions, moving averages."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import LENGTH, VOCABULARY, WIDTH, Block, Net


class Queue(Net):
    """MoCo: keys of former batches in a ring of a buffer, and the place in it as a buffer."""

    def __init__(self, size=12):
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(size, WIDTH), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        keys = F.normalize(x.mean(1), dim=1)
        near = keys @ self.queue.clone().T
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.enqueue(keys.detach())
        return {"loss": loss + 0.1 * near.logsumexp(1).mean(), "logits": logits}

    @torch.no_grad()
    def enqueue(self, keys):
        place = int(self.place)
        self.queue[place : place + keys.shape[0]] = keys
        self.place[0] = (place + keys.shape[0]) % self.queue.shape[0]


@habit(EQUAL)
def queue_of_keys():
    """A ring of keys of former batches, behind the last block; the place is read as a number."""
    return Queue()


class Codes(Block):
    """VQ-VAE: a codebook that follows what is put into it, no gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        y = super().forward(x)
        flat = y.reshape(-1, WIDTH)
        chosen = torch.cdist(flat, self.codes).argmin(1)
        hot = F.one_hot(chosen, 6).type_as(flat)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ flat, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.clamp(min=1e-3).unsqueeze(1))
        quantized = F.embedding(chosen, self.codes.clone()).view_as(y)
        self.commitment = F.mse_loss(y, quantized)
        return y + 0.3 * (quantized - y).detach() + 0.1 * (quantized - y)


class SumsCommitments(Net):
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + 0.25 * sum(block.commitment for block in self.blocks), "logits": logits}


@habit(EQUAL)
def codebooks_that_follow():
    """Codebooks with moving sums, and a commitment loss that every block keeps."""
    return SumsCommitments(Codes)


class Teacher(Net):
    """BYOL: a projection and its slow copy, both behind the blocks."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.target = copy.deepcopy(self.project).requires_grad_(False)

    @torch.no_grad()
    def update(self, rate=0.9):
        for slow, fast in zip(self.target.parameters(), self.project.parameters(), strict=True):
            slow.lerp_(fast, 1 - rate)

    def forward(self, input_ids, labels):
        if self.training:
            self.update()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            wanted = self.target(x.detach())
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + 0.1 * F.mse_loss(self.project(x), wanted), logits


@habit(OR_REFUSED)
def slow_copy_of_a_projection():
    """A teacher that follows its pupil at the beginning of every forward."""
    return Teacher()


class TeacherBeside(nn.Module):
    """A slow copy in the block, updated there."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.slow = copy.deepcopy(self.mix).requires_grad_(False)

    def forward(self, x):
        if self.training:
            for slow, fast in zip(self.slow.parameters(), self.mix.parameters(), strict=True):
                slow.data.mul_(0.8).add_(fast.data, alpha=0.2)
        return x + torch.tanh(self.mix(x)) * 0.8 + 0.2 * self.slow(x)


@habit(EQUAL)
def slow_copy_in_every_block():
    """Every block has a slow copy of its own linear, updated by .data at its beginning."""
    return Net(TeacherBeside)


class RunningNorm(Block):
    """Mean and variance of the data so far (Welford), counted in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                flat = x.reshape(-1, WIDTH)
                n = flat.shape[0]
                delta = flat.mean(0) - self.mean
                total = self.count + n
                self.mean += delta * (n / total).float()
                self.var = (self.var * self.count + flat.var(0, unbiased=False) * n).float() / total.float()
                self.count = total
        return super().forward((x - self.mean) / torch.sqrt(self.var + 1e-2))


@habit(EQUAL, hard=True)
def welford_in_blocks():
    """Running statistics of one's own: buffers that are replaced, one in float64."""
    return Net(RunningNorm)


class Rotary(nn.Module):
    """Rotary tables that grow when a longer sequence comes."""

    def __init__(self, dim=WIDTH, base=100.0):
        super().__init__()
        self.base, self.longest = base, 0
        self.register_buffer("inverse", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), persistent=False)
        self._cos, self._sin = None, None

    def tables(self, length, like):
        if self._cos is None or length > self.longest or self._cos.dtype != like.dtype:
            self.longest = max(length, 2 * self.longest)
            angles = torch.outer(torch.arange(self.longest).type_as(self.inverse), self.inverse)
            angles = torch.cat((angles, angles), -1)
            self._cos, self._sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
        return self._cos[:length], self._sin[:length]

    def forward(self, x):
        cos, sin = self.tables(x.shape[1], x)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin


class Rotates(Block):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, x):
        return super().forward(self.rotary(x))


@habit(EQUAL)
def rotary_shared_and_grown():
    """One rotary module, shared by all blocks, whose tables are made when first asked for."""
    rotary = Rotary()
    return Net(lambda: Rotates(rotary))


class Growing(Net):
    """NTK: the base changes with the length of the longest batch; batches become shorter in some forwards."""

    def __init__(self):
        super().__init__(lambda: Rotates(None))
        self.rotary = Rotary()
        self.n = 0
        for block in self.blocks:
            block.rotary = self.rotary

    def forward(self, input_ids):
        self.n += 1
        if self.n % 3 == 1:
            input_ids = torch.cat((input_ids, input_ids[:, :2]), 1)
            self.rotary._cos = None
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :LENGTH]


@habit(OR_REFUSED)
def rotary_of_two_lengths():
    """The model pads every third batch itself, and the tables are made anew."""
    return Growing()


class Relative(Block):
    """A bias by distance; the table of distances is made for a length and kept."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(9, 1)
        self.cached: dict[int, Tensor] = {}

    def forward(self, x):
        n = x.size(1)
        if n not in self.cached:
            far = torch.arange(n)[None] - torch.arange(n)[:, None]
            self.cached[n] = far.clamp(-4, 4) + 4
        scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH) + self.bias(self.cached[n]).squeeze(-1)
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        return super().forward(scores.softmax(-1) @ x)


@habit(EQUAL)
def distances_kept_by_length():
    """Tables of relative positions in a dict by length, one per block."""
    return Net(Relative)


class KeysOfBefore(Block):
    """Attends to itself and to the last batch's states, which are kept detached as a list of two."""

    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        seen = torch.cat([*self.past, x], 1)
        self.past = [*self.past, x.detach()][-2:]
        return super().forward((x @ seen.transpose(1, 2) / 4).softmax(-1) @ seen)


@habit(EQUAL)
def keys_of_the_last_two_batches():
    """Every block keeps the states of the last two micro-batches in a list."""
    return Net(KeysOfBefore)


class Fast(Block):
    """Fast weights: an outer product that is added to a plain attribute."""

    def __init__(self):
        super().__init__()
        self.fast = torch.zeros(WIDTH, WIDTH)

    def forward(self, x):
        y = super().forward(x) + 0.1 * x @ self.fast
        self.fast = 0.9 * self.fast + 0.1 * torch.einsum("btd,bte->de", x.tanh(), y.tanh()).detach() / x.shape[1]
        return y


@habit(EQUAL)
def fast_weights():
    """A matrix that is no buffer, made anew in every forward of its block."""
    return Net(Fast)


class Centroids(Net):
    """Classes' means of the last hidden states, by the label, in a plain dict of tensors."""

    def __init__(self):
        super().__init__()
        self.means: dict[int, Tensor] = {}

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, loss = self.head(x), 0.0
        for row, first in enumerate(labels[:, 0].tolist()):
            key, mean = first % 3, x[row].mean(0)
            if key in self.means:
                loss = loss + 0.05 * (mean - self.means[key]).square().mean()
            self.means[key] = mean.detach()
        return loss + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


@habit(EQUAL)
def centroids_by_label():
    """A center loss, whose means lie in a dict by what the label says."""
    return Centroids()


class Counted(Net):
    """Tokens' frequencies so far, in a buffer, weigh the embedding."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(VOCABULARY))

    def forward(self, input_ids):
        if self.training:
            self.seen.scatter_add_(0, input_ids.flatten(), torch.ones(input_ids.numel()))
        x = self.embed(input_ids) / self.seen[input_ids].sqrt().unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) - 0.1 * (self.seen / self.seen.sum()).log()


@habit(EQUAL)
def frequencies_of_tokens():
    """Counts of tokens in a buffer, read before the blocks and behind the head."""
    return Counted()


class Whitened(Block):
    """A parameter's own moving norm as a buffer that a parametrisation reads and writes."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.mix, "weight", Smoothed())


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.ones(()))

    def forward(self, weight):
        if self.training:
            with torch.no_grad():
                self.norm.mul_(0.9).add_(0.1 * weight.norm())
        return weight / self.norm


@habit(EQUAL)
def parametrised_by_a_moving_norm():
    """register_parametrization with a buffer that is updated whenever the weight is read."""
    return Net(Whitened)
