"""Tensors that units leave in lists and dicts, of which the model's code reads something else."""

from __future__ import annotations

import torch
from torch import nn

from proof.habit import EQUAL, habit
from proof.scene import Block, Net


class Appends(Block):
    """Appends what it gives to a list of the model's."""

    def forward(self, x):
        y = super().forward(x)
        self.seen.append(y.detach())
        return y


class CountsSeen(Net):
    def __init__(self):
        super().__init__(Appends)
        self.seen = []
        for block in self.blocks:
            block.seen = self.seen

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) / (1 + 0.01 * len(self.seen))
        del self.seen[:-2]
        return self.head(x)


@habit(EQUAL, hard=True)
def length_of_a_list_of_tensors():
    """Blocks append what they give to one list, of which the model reads the length alone."""
    return CountsSeen()


class Hooked(Net):
    """A forward hook on what is in the blocks keeps activations in a dict by name."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("mix"):
                module.register_forward_hook(self.keep(name))

    def keep(self, name):
        def hook(module, given, made):
            self.seen[name] = made.detach()

        return hook

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * (1 + 0.02 * len(self.seen))
        self.seen.clear()
        return self.head(x)


@habit(EQUAL, hard=True)
def number_of_captured_features():
    """Hooks keep activations in a dict, of which the model reads how many there are."""
    return Hooked()


class Pool(Block):
    """Keeps tensors in a set of its own, at first; the model asks whether it has."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        if len(self.kept) < 3:
            self.kept.append(x.detach().mean((0, 1)))
        return super().forward(x) + 0.1 * torch.stack(self.kept).mean(0)


class AsksPool(Net):
    def between(self, number, x):
        return x * (1 + 0.05 * len(self.blocks[number].kept))


@habit(EQUAL, hard=True)
def pools_that_fill():
    """Blocks keep means of their first micro-batches; the model asks how many."""
    return AsksPool(Pool)


@habit(EQUAL)
def pools_of_blocks_alone():
    """The same, and nobody asks."""
    return Net(Pool)


class Once(Block):
    """Keeps one tensor from its first call on, as an attribute that is None before."""

    def __init__(self):
        super().__init__()
        self.first = None

    def forward(self, x):
        if self.first is None:
            self.first = x.detach().mean((0, 1))
        return super().forward(x) + 0.1 * self.first


class AsksFirst(Net):
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in reversed(list(self.blocks)):
            x = x * (0.9 if block.first is None else 1.0)
            x = block(x)
        return self.head(x)


@habit(EQUAL, hard=True)
def tensors_kept_from_the_first_call_on():
    """The model asks before every block whether it has kept its tensor."""
    return AsksFirst(Once)
