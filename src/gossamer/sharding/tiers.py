"""Tiers: weights are in memory while their unit runs; gradients, optimizer states and all other weights are in a file.

Equations: those of `none`, bit for bit.
Order:   as traced in the first step, and anew when it changes. Before unit i runs, forward or backward, its weights are
read, and those of the units that follow are read ahead as far as `device` allows. A bucket of gradients goes to its
update as soon as it is full: a thread reads the next bucket's weights and states, one updates, one writes the last,
while backward goes on. With train.max_grad_norm an update needs the norm of all gradients: they go to the file, and the
update follows backward, where nothing hides it.
Ranks:   several average a bucket by an all-reduce once all have filled it, in the order in which the trace fills them,
the same on all; the mean goes to the update in the thread that received it. `shard_group: none`: each rank has a file
with all and makes all updates. `all`: each parameter, with its states, is in the file of one rank (by its name), which
updates it. Before a unit runs, the ranks read what they have of it, and an OR of their memory completes it on all, read
ahead as before. Limits are those of each rank.
Stages:  each rank has the units of its stage. Its passes follow the schedule (F0 F1 B0 ..), by which it reads ahead.
Gradients are open until the last micro-batch; those of tied weights are summed over stages after backward, and their
buckets are updated last.
State:   `device`: the weights of the running unit, of the next, and those read outside of units. `host`: up to 3
windows of a bucket's weights and states, and the gradients on their way. `file`: each bucket's weights and states
twice, so that an update never overwrites what counts: a step that is rejected or cut short by a crash leaves the last
one. With AdamW in float32 24 bytes per parameter, and 4 for gradients with clipping; with shard_group all these over n
ranks.
Traffic: per step and parameter 8 bytes of weights (forward and backward), 12 read and 12 written by the update; with
shard_group all these over n ranks. Between ranks 8 (n-1)/n of gradients, and a number per parameter: who has any. With
shard_group all also 8 (n-1)/n for every read of weights, of which a step has at most two per micro-batch and unit, and
a number per unit.
Limits:  device, host and file are hard: each allocation of model states is counted and checked. One that no step fits
is refused before the first step, with the smallest that works. Activations are those of plan.savers: activation_swap.
Good when: the states exceed the memory, and there is a disk; a step takes its bytes at the rate of that disk.
Paper:   Rajbhandari et al., ZeRO-Infinity, SC 2021, arXiv 2104.07857 (prefetch by a traced order, streamed update);
Liao et al., Fuyou, arXiv 2403.06504 (update of a layer during backward without staleness, delayed write-back).
A layer of the saver tiling has two tiles of its weight in `device`; its gradient and its record are whole, in `host`.
Unlike ZeRO-Infinity: whole parameters are divided and not rows, as kernels round the last numbers of a tensor in
another way than the others; so the ranks' files are as equal as names make them. Its gather sends half of what an OR
sends, of rows of one size. Gradients are averaged whole, not reduce-scattered, so that sums are those of plain
training.
Unlike ZeRO-Infinity and Fuyou: two records of each bucket instead of one updated in place.
Update:  by three threads of the rank, or by those of a process of its own (update: process), to which gradients go
through shared memory. Its numbers are the same. Its interpreter costs about 150 MB, which no limit counts.
Not for: shard_group all or split_backward in stages, local updates, exchanges but dense, adapters, CUDA devices: these
are refused. With shard_group all also the savers tiling and cut_cross_entropy, unequal numbers of micro-batches, and
units that some ranks alone run: a step of such a model ends on all ranks with one error that names ranks and units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.sharding import Sharding
from gossamer.sharding._tier_limits import TierLimits
from gossamer.spec.units import read_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers(Sharding):
    """Model states in memory tiers. `device`, `host`, `file`: the most bytes of each, such as 4GiB.

    `directory`: where the file is; it must be on a disk of this machine. `update`: by threads of
    the rank, or by a process of its own. `shard_group`: the ranks over which states are divided, `none` or `all`.
    """

    device: str | int
    host: str | int
    file: str | int
    directory: str
    update: Literal["threads", "process"] = "threads"
    shard_group: Literal["none", "all"] = "none"

    def __post_init__(self) -> None:
        self.new_limits()

    def new_limits(self) -> TierLimits:
        """Return new accounts of a rank, with nothing in use."""
        device, host, file = (read_size(getattr(self, one), key=one) for one in ("device", "host", "file"))
        return TierLimits.of(device=device, host=host, file=file)

    @property
    def folder(self) -> Path:
        """Return the directory of the file."""
        return Path(self.directory).expanduser()

    @property
    def is_sharded(self) -> bool:
        return self.shard_group == "all"

    @property
    def takes_parameters(self) -> bool:
        return self.is_sharded

    @property
    def by_parameter(self) -> bool:
        return self.is_sharded

    @property
    def gives_back(self) -> bool:
        return True

    @property
    def is_tiered(self) -> bool:
        return True

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        return ("all",) if self.is_sharded else ()

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        return given
