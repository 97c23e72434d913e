"""A look at what a model computes, of which nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Buffers, random numbers and the module's mode are afterwards as they were."""
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    rng, training = torch.get_rng_state(), module.training
    try:
        yield
    finally:
        module.train(training)
        torch.set_rng_state(rng)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
