"""The memory that every rank of a run will take, by category, before any of it is taken.

States follow from what a rank holds of every parameter (`Holding`), activations from the ghost of a micro-batch
(`model.ghost_step`), and the number of micro-batches under way from the schedule. What a process takes besides (the
interpreter, its libraries, what the allocator cannot use) is measured, not counted: see `job.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import prod

import torch
from torch import nn

from gossamer.autotune.plan_groups import levels_of
from gossamer.model.ghost_step import GhostStep, ghost_step
from gossamer.model.precision import precision_of
from gossamer.model.split.split_points import StageSpec
from gossamer.partition.rank_model import Planned
from gossamer.partition.saver_choice import saving
from gossamer.pipeline.from_plan import schedule_of
from gossamer.pipeline.schedule import StageCosts
from gossamer.pipeline.schedule_tasks import cost_of_schedule
from gossamer.recipe import Recipe
from gossamer.run.batches import Feed, RankBatch
from gossamer.run.staged_model import Forward, StagedModel, boundary_of
from gossamer.sharding import ElementBytes, Holding, RowPartition, UnshardOrder, bytes_of, holdings, shapes_of
from gossamer.sharding.tiers import Tiers
from gossamer.spec.action import Op
from gossamer.spec.errors import BadInput
from gossamer.sync import buckets_of

_FLOAT = 4  # bytes of a float32
# Of a process that keeps its freed memory (run/allocator.py): its heap grows to about twice the activations within a
# few steps, as glibc before 2.38 does not find a freed block again for an aligned one of the same size. Measured: 0.9
# (Llama) to 1.3 (GPT-2) times the activations are lost.
_FRAGMENTED = 1.0
_IN_FLIGHT = 3  # buckets of a coded or divided exchange that are there at a time: as they are, coded, and received
_ROUGHLY = 8  # numbers of an output of a matrix that a step has at most: as they are, activated, their gradients
_WIDTH_OF_SCORES = 64  # a block of four matrices has at most one head of attention per 16 numbers of its width
_COMPANION = 320 << 20  # of its interpreter, libraries and threads, as of a worker (job/fit.py)
_UPDATE_PROCESS = 168 << 20  # of its interpreter, torch and threads: 160 MB beside the windows, measured
_WORK = {Op.F: 1.0, Op.B_INPUT: 1.0, Op.B_WEIGHT: 1.0, Op.RECOMPUTE: 1.0, Op.B: 2.0}  # of stages that take alike


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The bytes of one rank at the peak of a step, by category; `checkpoint`: the copy that is written meanwhile."""

    parameters: int  # and buffers
    gradients: int
    optimizer: int
    exchange: int  # residuals and the like
    outer_loop: int
    activations: int
    adversarial: int  # weights of the last step, and a companion process
    update_process: int  # of states in tiers, without its buffers
    allocator: int  # what the heap of a process that keeps freed memory does not find again
    messages: int
    checkpoint: int

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, int]:
        """Return the bytes by category, in the order of declaration."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """The memory of all ranks. `unknown`: what could not be counted, and why; "" where all was."""

    ranks: tuple[RankMemory, ...]
    unknown: str = ""

    @staticmethod
    def of(planned: Planned, *, local_ranks: int) -> MemoryForecast:
        """Return the memory of a planned run, `local_ranks` of whose ranks share a machine and its disk."""
        parts = _Parts.of(planned, local_ranks)
        ghosts, unknown = parts.ghosts()
        return MemoryForecast(
            ranks=tuple(parts.memory(rank, ghosts) for rank in range(planned.plan.ranks)),
            unknown="; ".join(filter(None, (unknown, parts.unknown))),
        )

    @staticmethod
    def at_most(planned: Planned, *, local_ranks: int) -> MemoryForecast:
        """Return a generous figure of the same without running the model on shapes, which takes seconds.

        A token, pixel or feature of the largest input has, of every matrix, `_ROUGHLY` times as many numbers as it has
        outputs or inputs, and for each other one as many as the heads of attention that the matrix stands for. Layers
        that are called many times, or that make their input larger, may exceed it.
        """
        parts = _Parts.of(planned, local_ranks)
        ghosts = parts.rough_ghosts()
        ranks = tuple(parts.memory(rank, ghosts) for rank in range(planned.plan.ranks))
        return MemoryForecast(ranks=ranks, unknown=parts.unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the memory of every rank follows from."""

    planned: Planned
    recipe: Recipe
    deal: RowPartition
    local_ranks: int
    unknown: str

    @staticmethod
    def of(planned: Planned, local_ranks: int) -> _Parts:
        plan = planned.plan
        recipe, levels = Recipe.of(planned.asked.config, plan), levels_of(plan)
        is_open = recipe.sharding.needs_islands and "island" not in levels.groups
        return _Parts(
            planned=planned,
            recipe=recipe,
            deal=RowPartition(levels) if is_open else recipe.sharding.deal(levels),
            local_ranks=local_ranks,
            unknown="states are counted whole, as islands are found when the links are measured" if is_open else "",
        )

    @property
    def cut(self) -> StagedModel | None:
        return self.planned.outline.cut

    @property
    def module(self) -> nn.Module:
        return self.planned.outline.module

    @property
    def has_gradients(self) -> bool:
        return self.recipe.sync.probe is None

    def ghosts(self) -> tuple[Mapping[int, GhostStep], str]:
        """Return the ghost of the largest micro-batch of every replica, by replica, and why there is none."""
        plan, asked = self.planned.plan, self.planned.asked
        run = Forward(asked.objective, precision_of(asked.config.train.precision), torch.device("cpu"))
        groups = [] if self.cut is None else [self._units_of(part) for part in self.cut.parts]

        def ghost(batch: RankBatch) -> GhostStep:
            savers, in_stages = self.recipe.methods.savers, self.cut is not None
            one = saving(run, savers, units=plan.units, batch=batch, in_stages=in_stages)
            return ghost_step(self.module, one, groups=groups, has_backward=self.has_gradients)

        try:
            return self._by_replica(ghost), ""
        except BadInput as error:
            return {}, f"activations are not counted: {error.message}"

    def rough_ghosts(self) -> Mapping[int, GhostStep]:
        """Return a generous ghost of the largest micro-batch of every replica, as if each stage were the whole model.

        Raises what the user's data raise.
        """
        shapes = [p.shape for p in self.module.parameters() if p.dim() > 1]
        outputs = sum(max(shape[:2]) for shape in shapes)
        scores = sum(max(1, min(shape) // _WIDTH_OF_SCORES) for shape in shapes if len(shape) == 2)
        stages = 1 if self.cut is None else len(self.cut.parts)

        def ghost(batch: RankBatch) -> GhostStep:
            places = max((t.numel() for t in batch.values()), default=0)
            longest = max((max(t.shape[1:], default=1) for t in batch.values()), default=1)  # such as a sequence
            kept = _FLOAT * places * _ROUGHLY * (outputs + scores * longest)
            return GhostStep(kept=(kept,) * stages, passing=(0,) * stages, small=1.0)

        return self._by_replica(ghost)

    def _by_replica(self, made: Callable[[RankBatch], GhostStep]) -> Mapping[int, GhostStep]:
        """Return what is made of the largest micro-batch of every replica, once for replicas with as many rows."""
        plan, asked = self.planned.plan, self.planned.asked
        by_rows, found = dict[int, GhostStep](), dict[int, GhostStep]()
        for replica in range(plan.mesh.replica):
            rows = -(-plan.rows[replica] // plan.microbatches[replica])
            if rows not in by_rows:
                by_rows[rows] = made(Feed(asked.batches, plan, replica, asked.config.train.seed).fetch(0)[0].rows)
            found[replica] = by_rows[rows]
        return found

    def _units_of(self, part: StageSpec) -> frozenset[str]:
        assert self.planned.outlined is not None
        return frozenset(call.unit for call in self.planned.outlined.flow.calls[part.low : part.high])

    def memory(self, rank: int, ghosts: Mapping[int, GhostStep]) -> RankMemory:
        """Return the memory of one rank."""
        replica, place = self.planned.plan.axes.place(rank)
        held, sizes = self._held(rank, place)
        kept, trained, owned = (bytes_of(held.values(), part) for part in _apart(sizes))
        copies = self.has_gradients * (2 if self.recipe.config.train.verify.every else 1)
        states, messages = self._exchange(held, sizes) if self.has_gradients else (0, 0)
        outer, round_bytes = self._outer(held)
        sharding = self.recipe.sharding
        tiers = sharding if isinstance(sharding, Tiers) else None
        limits = tiers.new_limits() if tiers is not None else None
        if limits is not None:  # buffers are gradients and states on their way
            there = self._names(place)
            kept = sum(p.nbytes for n, p in self.module.named_parameters() if n in there)  # perhaps some on each rank
            kept, trained, copies, owned = min(kept, limits.device.limit), 0, 0, min(limits.host.limit, 4 * kept)
        activations = self._activations(ghosts.get(replica), replica, place)
        growth = round(activations * self._unused(ghosts.get(replica)))
        passes = 2 if self.recipe.config.train.adversarial.epsilon else 1  # of which both graphs are there at a time
        return RankMemory(
            parameters=kept + self._buffers(place) + self._unsharded(),
            gradients=trained * copies,
            optimizer=owned,
            exchange=states,
            outer_loop=outer,
            activations=passes * activations,
            adversarial=self._adversarial(place, kept, activations + growth),
            update_process=_UPDATE_PROCESS if tiers is not None and tiers.update == "process" else 0,
            allocator=passes * growth,
            messages=messages + round_bytes,
            checkpoint=0 if limits else self._checkpoint(held, sizes, kept, owned + outer, states),
        )

    def _adversarial(self, place: int, kept: int, activations: int) -> int:
        """Return the bytes of the weights and buffers of the last step, and of a companion process where there is one.

        `activations`: of one pass, with the growth of the heap.
        """
        settings = self.recipe.config.train.adversarial
        if not (settings.epsilon and settings.delay):
            return 0
        before = kept + self._buffers(place)  # with a companion that of untrained ones too
        return before + (_COMPANION + self._buffers(place) + activations if settings.ahead else 0)

    def _names(self, place: int) -> frozenset[str]:
        """Return the names of the parameters and buffers that the ranks at a place of the pipeline hold."""
        if self.cut is None:
            return frozenset(n for n, _ in (*self.module.named_parameters(), *self.module.named_buffers()))
        return frozenset[str]().union(*(self.cut.parts[stage].holds for stage in self.cut.stages_at(place)))

    def _held(self, rank: int, place: int) -> tuple[dict[str, Holding], dict[str, ElementBytes]]:
        names, sharding = self._names(place), self.recipe.sharding
        params = {n: p for n, p in self.module.named_parameters() if n in names}
        rule, sizes = self.recipe.optimizer, dict[str, ElementBytes]()
        for name, p in params.items():
            size = p.element_size()
            copies = (size < _FLOAT) + (sharding.differences is not None)  # in float32
            wide = max(_FLOAT, size)
            states = rule.row_bytes(name, tuple(p.shape), torch.float32 if wide == _FLOAT else torch.float64)
            sizes[name] = ElementBytes(size, size * p.requires_grad, wide * copies, states)
        frozen = [n for n, p in params.items() if not p.requires_grad]
        return holdings(self.deal, shapes_of(params), rank, frozen=frozen), sizes

    def _buffers(self, place: int) -> int:
        names = self._names(place)
        return sum(b.nbytes for n, b in self.module.named_buffers() if n in names)

    def _unsharded(self) -> int:
        """Return the bytes of the parameters that are gathered at one time: two units, and those outside of units."""
        if not self.recipe.sharding.takes_parameters or self.recipe.sharding.is_tiered:
            return 0
        walk = UnshardOrder.of(self.module, self.planned.plan.units)
        always = sum(layout.nbytes for layout in walk.always.layouts)
        units = [sum(layout.nbytes for layout in unit.layouts) for unit in walk.units]
        return always + max((a + b for a, b in pairwise(units)), default=sum(units))

    def _exchange(self, held: Mapping[str, Holding], sizes: Mapping[str, ElementBytes]) -> tuple[int, int]:
        """Return the bytes of the state of all exchanges, and those of the buckets that are under way."""
        plan = self.planned.plan
        trained = {n: p for n, p in self.module.named_parameters() if n in held and sizes[n].gradient}
        there = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in trained.items()}
        exchanges = self.recipe.methods.exchanges(there, self.deal)
        buckets = buckets_of(there, exchanges, bucket_bytes=plan.bucket_bytes, named=plan.buckets)
        states = sum(t.nbytes for layout, one in buckets for _, t in one.init(layout).flatten())
        if plan.ranks == 1:
            return states, 0
        is_plain = not self.recipe.sharding.is_sharded and all(one.traits.lossless for _, one in buckets)
        return states, (1 if is_plain else _IN_FLIGHT) * max((layout.nbytes for layout, _ in buckets), default=0)

    def _outer(self, held: Mapping[str, Holding]) -> tuple[int, int]:
        """Return the bytes of the outer loop's state, and those of a round that is under way."""
        loop = self.recipe.sync.loop
        if loop is None:
            return 0, 0
        numel = sum(prod(one.shape) for one in held.values() if one.owned.rows.count)
        kept = 1 + len(loop.outer_optimizer.slots) + (loop.step_exchange is not None)
        return _FLOAT * kept * numel, 2 * _FLOAT * numel // loop.fragments

    def _checkpoint(
        self, held: Mapping[str, Holding], sizes: Mapping[str, ElementBytes], kept: int, states: int, private: int
    ) -> int:
        """Return the bytes that a rank copies to write them: its part of what the ranks of its machine have alike."""
        sharding = self.recipe.sharding
        if (
            self.recipe.config.model.adapter != "none" or self.recipe.config.model.side != "none"
        ):  # checkpoints leave the base out
            trained = {n: one.kept if one.gradient else 0 for n, one in sizes.items()}
            kept = bytes_of(held.values(), {n: ElementBytes(size, 0, 0) for n, size in trained.items()})
        alike = max(1, self.local_ranks // self.planned.plan.mesh.pipe)
        kept = kept if sharding.takes_parameters else kept // alike
        return kept + (states if sharding.is_sharded else states // alike) + private

    def _unused(self, ghost: GhostStep | None) -> float:
        """Return what the heap grows by beyond the activations, as a fraction of them.

        Where states are sharded, blocks of 1 MiB and more go back to the system, and only of smaller ones some is lost.
        """
        if ghost is None or self.planned.asked.device.type != "cpu":
            return 0.0
        return _FRAGMENTED * (ghost.small if self.recipe.sharding.is_sharded else 1.0)

    def _activations(self, ghost: GhostStep | None, replica: int, place: int) -> int:
        if ghost is None:
            return 0
        if self.cut is None:
            return ghost.kept[0] + ghost.passing[0]
        assert self.planned.outlined is not None
        costs = []
        for part, kept in zip(self.cut.parts, ghost.kept, strict=True):
            edges = boundary_of(self.planned.outlined.flow, part).receives
            received = sum(prod(one.form.shape) * one.form.dtype.itemsize for one in edges)
            costs.append(StageCosts(seconds=_WORK, live_bytes=kept + received, kept_bytes=received))
        schedule = schedule_of(self.planned.plan, replica, self.recipe.methods.schedule)
        under_way = cost_of_schedule(schedule, costs).peak_bytes
        passing = max(ghost.passing[stage] for stage in self.cut.stages_at(place))
        return (under_way[place] if under_way else 0) + passing


def _apart(sizes: Mapping[str, ElementBytes]) -> tuple[dict[str, ElementBytes], ...]:
    """Return the sizes of parameters alone, of their gradients alone, and of the states of the optimizer alone."""
    return (
        {n: ElementBytes(one.kept, 0, 0) for n, one in sizes.items()},
        {n: ElementBytes(0, one.gradient, 0) for n, one in sizes.items()},
        {n: ElementBytes(0, 0, one.owned, one.owned_row) for n, one in sizes.items()},
    )
