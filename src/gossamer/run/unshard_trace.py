"""How a model whose parameters are sharded is walked through: seen in one forward, while it is still whole."""

from __future__ import annotations

import numpy as np

from gossamer.model.side_effects import untouched
from gossamer.run.batches import Batches, moved
from gossamer.run.step_runner import ModelRuntime
from gossamer.sharding import UnshardOrder, trace_access


def walk_of(engine: ModelRuntime, batches: Batches, units: tuple[str, ...]) -> UnshardOrder:
    """Run the first sequence forward, the same on all ranks; the module is afterwards as it was."""
    module = engine.module
    rows = moved(batches.batch(np.zeros(1, np.int64)), engine.device)
    with untouched(module), trace_access(module, units) as seen:
        module.train()
        engine.loss(rows, step=0, key=0)
    return seen.walk()
