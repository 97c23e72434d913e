"""How a model whose parameters are sharded is walked through: seen in one forward, while it is still whole."""

from __future__ import annotations

import numpy as np
import torch

from gossamer.memory import Walk, watched
from gossamer.run.batches import Batches, moved
from gossamer.run.stage import Engine


def walk_of(engine: Engine, batches: Batches, units: tuple[str, ...]) -> Walk:
    """Run the first sequence forward, the same on all ranks; buffers and random numbers are afterwards as they were."""
    module = engine.module
    rows = moved(batches.batch(np.zeros(1, np.int64)), engine.device)
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    rng, training = torch.get_rng_state(), module.training
    module.train()
    try:
        with watched(module, units) as seen:
            engine.loss(rows, step=0, key=0)
    finally:
        module.train(training)
        torch.set_rng_state(rng)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    return seen.walk()
