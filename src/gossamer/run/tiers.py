"""Training with states in tiers: what is checked before the first step, and the step itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gossamer.comm.channel import Channel, gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.optimizer import Optimizer
from gossamer.run.checkpoint import trainable
from gossamer.run.forward import Pipeline
from gossamer.run.parts import Parts
from gossamer.run.step_algorithm import Gradients, ReplayedSteps, StepAlgorithm, StepAttempt
from gossamer.run.task import Task
from gossamer.run.update_process import UpdateProcess
from gossamer.sharding import (
    LEVEL,
    GroupUpdater,
    HostListener,
    ShardedOptimizer,
    TierAccount,
    TieredStates,
    TierLayout,
    TierLimits,
    TierShares,
    TierUpdater,
    TiledWeight,
    UpdateTerms,
    remove_left_over,
    smallest_device,
    smallest_host,
    tier_path,
)
from gossamer.sharding.tiers import Tiers
from gossamer.spec.action import Op
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input
from gossamer.spec.odd_one_out import ranked
from gossamer.spec.units import show_bytes, show_seconds
from gossamer.store.tier_file import TierFile, disk_number, file_system, free_bytes, is_far
from gossamer.sync import StepAgreement, StepVote, buckets_of

_WINDOWS = 3  # one is read, one updated, one written


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredStep(StepAlgorithm):
    """A step by backpropagation whose gradients go to tiers as they are made.

    Without clipping each bucket is updated beside backward. With it the update follows, when the norm is known.
    `updates`: returns the number of updates made before.
    """

    gradients: Gradients
    states: ShardedOptimizer
    tiers: TieredStates
    clip: float
    updates: Callable[[], int]

    def attempt(self, task: Task) -> StepAttempt:
        self.tiers.begin(self._terms(task, self.updates()))
        work = self.gradients.attempt(task)
        return StepAttempt(StepVote(work.loss(), speaks=work.speaks), work.compute_s)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        replica = self.gradients.replica
        replica.commit()
        idle = agreement.idle - self.gradients.tied.holders.keys()  # of those each stage knows its own part
        scale = self.clip / (agreement.norm + 1e-6) if self.clip and agreement.norm > self.clip else 1.0
        terms = self._terms(task, updates, scale)
        if not self.tiers.is_hidden:
            self.tiers.update(terms, idle)
        for layout, mean in replica.handed_over():
            self.tiers.update_with(layout, mean, terms, idle)
        self.tiers.commit(updates + 1)
        if not self.gradients.pipeline.together:
            self.states.missed(idle)

    def _terms(self, task: Task, updates: int, scale: float = 1.0) -> UpdateTerms:
        skipped = dict(self.states.skipped) if self.states.rule.counts_each else {}
        return UpdateTerms(task.window.lr, updates, scale, skipped)

    def reject(self, task: Task) -> None:
        for layout, mean in self.gradients.replica.handed_over():
            self.tiers.drop(layout, mean)
        self.tiers.reject()
        self.gradients.replica.reject()

    def begin(self, done: int, until: int) -> ReplayedSteps:
        self.tiers.settle(self.updates())  # what a checkpoint has restored counts
        return ReplayedSteps()  # gradients are not kept

    def settle(self, done: int) -> None:
        """Do nothing: what a step has committed is in the file."""

    def close(self) -> None:
        """Do nothing: the tiers are closed with the states that they hold."""


def tiers_of(
    parts: Parts,
    rule: Optimizer,
    exchange: Mapping[str, Exchange],
    pump: CommThread,
    pipeline: Pipeline,
    tiled: Sequence[TiledWeight] = (),
) -> TieredStates:
    """Put the states of a rank into tiers; all ranks must call it, each has a file of its own.

    `pump`: brings the weights that other ranks have, beside the messages of the steps.

    `tiled`: the weights of layers that run in tiles. Of those that nothing else reads, a tile is in memory at one time.
    Raises BadInput, before anything is moved, for a limit that no step fits, or files that do not fit their disk.
    """
    sharding, walk, channel = parts.recipe.sharding, parts.walk, pump.channel
    assert isinstance(sharding, Tiers) and walk is not None
    _check_device(parts.device)
    shares = TierShares(sharding.deal(channel.levels).of_parameters, channel.rank)
    if shares.divides:
        channel.widen(ProcessGroups({LEVEL: channel.levels.groups["all"]}))
    cut = buckets_of(trainable(parts.module), exchange, bucket_bytes=parts.plan.bucket_bytes, named=parts.plan.buckets)
    names = [tuple(entry.name for entry in layout.entries) for layout, _ in cut]
    is_hidden = not parts.config.train.max_grad_norm
    layout = TierLayout.of(parts.held, names, rule, keeps_gradients=not is_hidden, shares=shares)
    tiled = [one for one in tiled if one.name in walk.tiled]
    least = _Needed.of(parts, channel, layout, names, tiled)
    most = least.on_all(channel)
    limits = sharding.new_limits()
    most.check(limits)
    ranks = len(channel.levels.everyone)
    remove_left_over(sharding.folder, ranks)
    _check_disks(channel, sharding.folder, layout.size_bytes)
    windows = min(_WINDOWS, 1 + (limits.host.limit - least.host) // max(1, layout.window_bytes))
    found = TieredStates.of(
        rule,
        parts.module,
        parts.held,
        walk,
        layout,
        limits,
        folder=sharding.folder,
        rank=channel.rank,
        windows=windows,
        updater_of=_updaters(sharding.update, rule, layout, limits.host, windows, parts.config),
        is_hidden=is_hidden,
        is_divided=sharding.is_sharded or parts.cut is not None,
        passes=[action.op is not Op.B for action in pipeline.row if action.op in (Op.F, Op.RECOMPUTE, Op.B)],
        tiled=tiled,
        shares=shares,
        pump=pump,
    )
    if ranks > 1:
        found.rate = float(gathered(channel, [found.rate]).min())  # all wait for the slowest in every step
        found.largest_bytes = most.file
    return found


def _check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise bad_input(
            wanted="a model on the CPU, with model states in tiers",
            got=f"a model on {device.type}",
            do='hide the devices (CUDA_VISIBLE_DEVICES=""), or leave plan.sharding at none',
            key="plan.sharding",
        )


def _updaters(
    update: str, rule: Optimizer, layout: TierLayout, host: TierAccount, windows: int, config: RunConfig
) -> Callable[[TierFile], GroupUpdater]:
    """Return what starts the updates of a file: in a process of their own, or in threads of this one."""

    def updater_of(file: TierFile) -> GroupUpdater:
        if update == "process":
            return UpdateProcess.of(rule, layout, host, file, windows, config)
        threads = TierUpdater(rule, layout, file, windows, HostListener(layout, host))
        threads.start()
        return threads

    return updater_of


@dataclass(frozen=True, slots=True)
class _Needed:
    """The least bytes of each tier with which a step works: on a rank, or on the rank that needs most of it."""

    device: int
    host: int
    file: int

    @staticmethod
    def of(
        parts: Parts,
        channel: Channel,
        layout: TierLayout,
        names: Sequence[tuple[str, ...]],
        tiled: Sequence[TiledWeight],
    ) -> _Needed:
        """Return what this rank needs. `names`: the parameters of each bucket."""
        assert parts.walk is not None
        averages = parts.cut is not None and len(channel.levels.group("all", channel.rank)) > 1
        host = smallest_host(
            layout,
            parts.walk,
            names,
            is_all_open=averages or max(parts.plan.microbatches) > 1,
            kept=frozenset() if parts.cut is None else parts.cut.parameters_on_several_stages().keys(),
        )
        return _Needed(smallest_device(parts.walk, parts.held, tiled), host, layout.size_bytes)

    def on_all(self, channel: Channel) -> _Needed:
        """Return the most that any rank needs, as files of divided states differ; all ranks must call it."""
        mine = [float(self.device), float(self.host), float(self.file)]
        most = mine if channel.levels.is_alone else gathered(channel, mine).amax(0).tolist()
        return _Needed(*map(int, most))

    def check(self, limits: TierLimits) -> None:
        """Raise BadInput, on all ranks alike, for a limit below what is needed."""
        _check("device", self.device, limits.device.limit, "the weights of the largest unit, and those outside")
        _check("host", self.host, limits.host.limit, "buffers, and the gradients that are open at once")
        _check("file", self.file, limits.file.limit, "weights and optimizer states, twice, and gradients")


def _check(tier: str, needed: int, limit: int, what: str) -> None:
    if needed > limit:
        raise bad_input(
            wanted=f"at least {needed} bytes ({show_bytes(needed)}) for {what}",
            got=f"{limit} bytes",
            do=f"set {tier} to {needed} or more",
            key=f"plan.sharding.tiers.{tier}",
        )


def _check_disks(channel: Channel, folder: Path, size_bytes: int) -> None:
    """Raise BadInput, on all ranks alike, where the files of the ranks that share a disk do not fit it."""
    there = tier_path(folder, channel.rank)
    had = there.stat().st_blocks * 512 if there.exists() else 0
    mine = [float(disk_number(folder)), float(size_bytes), float(had), float(free_bytes(folder))]
    rows = [mine] if channel.levels.is_alone else gathered(channel, mine).tolist()
    for disk in dict.fromkeys(row[0] for row in rows):
        sharers = [rank for rank, row in enumerate(rows) if row[0] == disk]
        wanted = int(sum(rows[rank][1] for rank in sharers))
        room = int(min(rows[rank][3] for rank in sharers) + sum(rows[rank][2] for rank in sharers))
        if wanted > room:
            whose = f" of {ranked(sharers)}, which share a disk" if len(sharers) > 1 else ""
            whose = whose or (f" of rank {sharers[0]}" if len(rows) > 1 else "")
            raise bad_input(
                wanted=f"{show_bytes(wanted)} for the states of the model in {folder}{whose}",
                got=f"{show_bytes(room)} free",
                do="free space there, or give a directory on a larger disk",
                key="plan.sharding.tiers.directory",
            )


def remarks_of(parts: Parts, tiers: TieredStates) -> Iterator[tuple[str, str]]:
    """Yield (level, message) of what is to be known before: bytes of a step, rate, what is not hidden."""
    sharding, ranks = parts.recipe.sharding, parts.plan.ranks
    assert isinstance(sharding, Tiers) and parts.walk is not None
    times = Counter(index for index, _ in tiers.parameters.expected)
    inside = {name: times[index] for index, unit in enumerate(parts.walk.units) for name in unit.names}
    reads = {name: inside.get(name, 1) for group in tiers.layout.groups for name in group.names}
    read, written = tiers.layout.step_bytes(reads)
    way = "past the page cache (O_DIRECT)" if tiers.file.is_direct else "through the page cache, and dropped from it"
    who, measured = "a step", "as measured"
    if ranks > 1:
        who, measured = "each rank and step", f"as measured on the slowest of {ranks} ranks, all of them at a time"
    yield (
        "info",
        f"tiers: {who} reads at most {show_bytes(read)} and writes {show_bytes(written)} {way}: at "
        f"{show_bytes(tiers.rate)}/s, {measured}, {show_seconds((read + written) / tiers.rate)}",
    )
    if ranks > 1:
        what = "all states" if parts.cut is None else "the states of its stage"
        what = "the states of some parameters" if tiers.shares.divides else what
        yield (
            "info",
            f"tiers: each of the {ranks} ranks has {what} in a file of its own, the largest of "
            f"{show_bytes(tiers.largest_bytes)}; those that share a disk share its space and its rate",
        )
    if not tiers.is_hidden:
        yield (
            "info",
            "tiers: train.max_grad_norm needs the norm of all gradients, so updates follow backward and nothing of "
            "them is hidden; with max_grad_norm 0 they run beside it",
        )
    if is_far(kind := file_system(sharding.folder)):
        yield (
            "warning",
            f"tiers: {sharding.folder} is on a network file system ({kind}): each step waits for the network, and "
            "a crash may lose what it has not written; give a directory on a disk of this machine",
        )
