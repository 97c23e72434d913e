"""The settings of a training process: its allocator and its number of compute threads."""

from __future__ import annotations

import os

import torch

from gossamer.run.allocator import give_freed_memory_back, keep_freed_memory
from gossamer.sharding import Sharding
from gossamer.spec.config import RunConfig


def set_memory(sharding: Sharding) -> None:
    """Set the allocator of this process, before its first tensor.

    With sharded model states freed memory returns to the system; otherwise the process keeps it.
    """
    if sharding.is_sharded or sharding.is_tiered:
        give_freed_memory_back()
    else:
        keep_freed_memory()


def set_threads(config: RunConfig, local_ranks: int) -> None:
    """Set the number of compute threads of this process: `machines.threads`.

    `auto`: OMP_NUM_THREADS if the environment sets it, else the host's cores divided evenly by its ranks, or by its
    ranks and their companion processes.
    """
    wanted, processes = config.machines.threads, local_ranks * (2 if config.train.adversarial.has_companion else 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    given = os.environ.get("OMP_NUM_THREADS", "")
    shared = int(given) if given.isdigit() and int(given) else max(1, cores // processes)
    torch.set_num_threads(shared if wanted == "auto" else int(wanted))
