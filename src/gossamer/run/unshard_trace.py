"""Trace the order in which a forward uses the units of a model, before its parameters are sharded."""

from __future__ import annotations

import numpy as np

from gossamer.model.side_effects import untouched
from gossamer.run.batches import Batches, moved
from gossamer.run.step_runner import ModelRuntime
from gossamer.sharding import UnshardOrder, trace_access


def walk_of(engine: ModelRuntime, batches: Batches, units: tuple[str, ...]) -> UnshardOrder:
    """Run the first sequence forward, the same on all ranks, and return the order in which units are unsharded.

    The module is afterwards as it was.
    """
    module = engine.module
    rows = moved(batches.batch(np.zeros(1, np.int64)), engine.device)
    with untouched(module), trace_access(module, units, engine.tiled) as seen:
        module.train()
        engine.loss(rows, step=0, key=0)
    return seen.walk()
