"""Trace the order in which a forward uses the units of a model, before its parameters are sharded."""

from __future__ import annotations

import numpy as np
import torch

from gossamer.comm.comm_thread import CommThread
from gossamer.model.side_effects import untouched
from gossamer.run.batches import MicroBatch, moved
from gossamer.run.engine import pieces_of, pipeline_of
from gossamer.run.forward import forward_with_graphs
from gossamer.run.parts import Parts
from gossamer.run.step_runner import ModelRuntime
from gossamer.sharding import UnshardOrder, trace_access


def walk_of(parts: Parts, engine: ModelRuntime, pump: CommThread) -> UnshardOrder:
    """Run the first sequence forward, the same on all ranks, and return the order in which units are unsharded.

    In stages it goes through the pipeline, and each rank learns the order of its own units; all ranks must call it. The
    module is afterwards as it was.
    """
    module, absent = engine.module, frozenset[str]()
    rows = moved(parts.train.batch(np.zeros(1, np.int64)), engine.device)
    if parts.cut is not None:
        absent = frozenset(name for name, _ in module.named_parameters()) - parts.held.keys()
    with untouched(module), trace_access(module, parts.units, engine.tiled, absent=absent) as seen:
        module.train()
        if parts.cut is None:
            engine.loss(rows, step=0, key=0)
        else:
            pipeline = pipeline_of(parts, pump.channel.rank, pump.channel.levels)
            forward = pipeline.forward_only(max(map(len, parts.cut.groups)))
            batches = {n: MicroBatch(0, dict(rows)) for n in sorted(forward.batches)}
            with torch.enable_grad():
                forward_with_graphs(pump, pieces_of(parts, engine), forward, batches)
    return seen.walk()
