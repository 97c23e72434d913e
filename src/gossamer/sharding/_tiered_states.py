"""The states of a rank in tiers: weights in memory while their unit runs, all else in a file, updated group by group.

A step is a transaction here too. An update writes the record of a group that does not count; `commit` makes what was
written durable and switches the journal to it. A step that is rejected, or a crash, leaves the records as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.comm_thread import CommThread
from gossamer.ops.norm import row_norms
from gossamer.optimizer import Optimizer
from gossamer.sharding._group_updater import GroupUpdater, UpdateProgress, UpdateTerms
from gossamer.sharding._row_partition import RowRange
from gossamer.sharding._tier_files import layout_file, remove_files, tier_path, told_of
from gossamer.sharding._tier_layout import WEIGHT, TierGroup, TierLayout, first_states
from gossamer.sharding._tier_limits import TierLimits
from gossamer.sharding._tier_shares import TierShares, compacted
from gossamer.sharding._tiered_parameters import TieredParameters
from gossamer.sharding._tiled_weight import TiledWeight
from gossamer.sharding._unshard_order import UnshardOrder
from gossamer.spec.errors import RunFailed
from gossamer.store.tier_file import TierFile, TierJournal, mixed_rate, page_buffer, paged

_FIRST_BYTES = 4 << 20  # written at a time, before the first step
_STUCK_S = 10.0  # without an update under way: nobody will give memory back


@dataclass(slots=True)
class TieredStates:
    """Weights, gradients and optimizer states of one rank in a file, with what moves them.

    `is_hidden`: whether groups are updated while backward goes on; else when all gradients of the step are known.
    """

    layout: TierLayout
    limits: TierLimits
    file: TierFile
    journal: TierJournal
    parameters: TieredParameters
    updater: GroupUpdater
    is_hidden: bool
    records: list[int]  # by group: the record that counts
    rate: float  # bytes per second of the file, reads and writes together, measured before the first step
    shares: TierShares  # which parameters this rank has
    is_divided: bool  # whether files of one step belong together, and each keeps the state before it too
    order: tuple[int, ...]  # of the trained groups, as backward fills them: in it ranks average their gradients
    largest_bytes: int = 0  # of the files of all ranks, where there are several
    is_closed: bool = False
    is_kept: bool = False  # whether `close` leaves the file
    has_moved: bool = False  # whether a step of this run is in the file
    waited_s: float = 0.0  # seconds that steps waited for updates to end
    _of_name: dict[str, int] = field(default_factory=dict)
    _idle: dict[int, frozenset[str]] = field(default_factory=dict)  # of this step, by group
    _terms: UpdateTerms | None = None
    _updates: int = 0
    _has_before: bool = False  # whether the journal knows the state before the last update

    @staticmethod
    def of(
        rule: Optimizer,
        module: nn.Module,
        params: Mapping[str, Tensor],
        walk: UnshardOrder,
        layout: TierLayout,
        limits: TierLimits,
        *,
        folder: Path,
        rank: int,
        windows: int,
        updater_of: Callable[[TierFile], GroupUpdater],
        is_hidden: bool,
        is_divided: bool,
        shares: TierShares,
        pump: CommThread,
        passes: Sequence[bool] = (True, False),
        tiled: Sequence[TiledWeight] = (),
    ) -> TieredStates:
        """Write the parameters `params` of `module` and the first states to a file, and take them out of memory.

        `shares`: which of them this rank has, as the layout knows; `pump` brings the weights of others, if any.
        `is_divided`: whether files of one step belong together, so that each keeps the state before its last update.
        `updater_of` makes what updates groups in the file, with `windows` buffers of one record each.
        """
        path = tier_path(folder, rank)
        limits.file.take(layout.size_bytes)
        limits.host.take(windows * layout.window_bytes)
        journal = TierJournal(path.with_suffix(".json"))
        of_name = {name: i for i, group in enumerate(layout.groups) for name in group.names}
        records = [0] * len(layout.groups)
        weights = {name: one for group in layout.groups for name, one in group.weights.items()}

        def offset_of(name: str) -> int:
            index = of_name[name]
            return layout.groups[index].starts[records[index]] + weights[name].start

        file = TierFile.create(path, layout.size_bytes)
        with ExitStack() as undo:  # an open file stays locked, so that no other run of this process could have it
            undo.callback(remove_files, path)
            undo.callback(file.close)
            journal.remove()  # from here on the file holds no consistent state, until the first one is written
            rate = mixed_rate(file)
            TierJournal(layout_file(path)).write({"groups": [told_of(group) for group in layout.groups]})
            for group in layout.groups:
                _write_first(group, params, rule, file, shares)
            parameters = TieredParameters.of(
                module, params, walk, file, offset_of, limits.device, passes, tiled, shares=shares, pump=pump
            )
            undo.callback(parameters.close)
            updater = updater_of(file)
            undo.callback(updater.close)
            order = closing_order(walk, [group.names for group in layout.trained])
            found = TieredStates(
                layout=layout,
                limits=limits,
                file=file,
                journal=journal,
                parameters=parameters,
                updater=updater,
                is_hidden=is_hidden,
                records=records,
                rate=rate,
                shares=shares,
                is_divided=is_divided,
                order=order,
                _of_name=of_name,
            )
            found.settle(0)
            undo.pop_all()
        return found

    def begin(self, terms: UpdateTerms) -> None:
        """Begin an attempt at a step; `terms` are those of its update if it takes place beside backward."""
        self.progress.wait()
        self.progress.written.clear()
        self._idle, self._terms = {}, terms

    @property
    def progress(self) -> UpdateProgress:
        """Return what has been submitted to the updater and done."""
        return self.updater.progress

    def open_gradient(self, layout: Layout, awaited: Callable[[], str | None]) -> Bucket:
        """Return a gradient buffer of zeros, when updates have made room for it.

        `awaited`: None while a mean of several ranks is under way, after which there may be room; else what full
        buckets of this rank wait for, "" for nothing. It raises where their exchange has failed.
        """
        began = time.perf_counter()

        def failed() -> None:
            self.progress.check()
            name = awaited()
            if name is None or not self.progress.is_idle:
                return
            if time.perf_counter() - max(began, self.progress.idle_since) > _STUCK_S:
                host = self.limits.host
                behind = f" Full buckets wait to be averaged after that of {name}, as on all ranks." if name else ""
                raise RunFailed(
                    f"the gradients of this step are open in another order than in the trace before the first one, and "
                    f"{layout.nbytes} more bytes, for {layout.entries[0].name}, do not fit the {host.limit} of "
                    f"plan.sharding.tiers.host, of which {host.used} are in use: set host to "
                    f"{host.used + layout.nbytes} or more.{behind}"
                )

        self.limits.host.take_in_turn(layout.nbytes, failed)
        self.waited_s += time.perf_counter() - began
        return Bucket(layout, self.updater.gradient(self._of_name[layout.entries[0].name]))

    def take(self, layout: Layout, mean: Tensor, idle: Collection[str]) -> tuple[Tensor, Tensor]:
        """Take over the mean gradient of a group; return the norms of its rows, and of what is left (see ops.norm)."""
        index = self._of_name[layout.entries[0].name]
        norms = row_norms(mean, self.layout.norm_dtype)
        mean = compacted(mean, self.shares.part(layout))
        self._idle[index] = frozenset(idle)
        if self.is_hidden:
            assert self._terms is not None
            self._submit(index, mean, self._terms)
        else:
            self.updater.keep(index, mean)
        return norms

    def update(self, terms: UpdateTerms, idle: Collection[str]) -> None:
        """Update all groups, whose gradients are in the file; `idle`: parameters without a gradient on any rank."""
        self._idle = {index: frozenset(idle) for index in self._idle}
        for index in self._idle:
            self._submit(index, None, terms)

    def update_with(self, layout: Layout, mean: Tensor, terms: UpdateTerms, idle: Collection[str]) -> None:
        """Update a group whose mean gradient was kept in memory until now, as those of tied weights are."""
        index = self._of_name[layout.entries[0].name]
        self._idle[index] = frozenset(idle)
        self._submit(index, compacted(mean, self.shares.part(layout)), terms)

    def drop(self, layout: Layout, mean: Tensor) -> None:
        """Free the gradient of a group that is not updated."""
        self.updater.drop(self._of_name[layout.entries[0].name], mean)

    def rows(self, name: str, shape: Sequence[int]) -> RowRange:
        """Return the rows of a parameter that this rank has: all, or none of one that another rank has."""
        return self.shares.rows(name, shape)

    def _submit(self, index: int, gradient: Tensor | None, terms: UpdateTerms) -> None:
        idle = self._idle[index]
        if idle >= set(self.layout.groups[index].names):  # nothing of it moves
            if gradient is not None:
                self.updater.drop(index, gradient)
            return
        if self._has_before:  # from now on the records before are overwritten
            self._has_before = False
            self.journal.write({"updates": self._updates, "records": self.records, "moved": []})
        self.updater.submit(index, self.records[index], gradient, idle, terms)

    def commit(self, updates: int) -> None:
        """Make the step count: wait for its updates, make them durable, and switch the journal to them."""
        began = time.perf_counter()
        self.progress.wait()
        moved = sorted(self.progress.written)
        for index in moved:
            self.records[index] = 1 - self.records[index]
        self.progress.written.clear()
        self.settle(updates, moved)
        self.has_moved = True
        self.waited_s += time.perf_counter() - began
        self.parameters.release()

    def reject(self) -> None:
        """Leave the records as they were."""
        self.progress.wait()
        self.progress.written.clear()
        self.parameters.release()

    def settle(self, updates: int, moved: Sequence[int] = ()) -> None:
        """Make what counts durable, and write the journal: the state after so many updates.

        `moved`: the groups whose other record is the state before the last update. Where ranks divide the states they
        are kept until the next update begins: no rank begins one before all have settled this.
        """
        self.file.settle()
        self._updates, self._has_before = updates, self.is_divided and bool(moved)
        self.journal.write(
            {"updates": updates, "records": self.records, "moved": list(moved) if self._has_before else []}
        )

    def mapped(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter, slot, tensor) of all that counts; its memory is the file's, read when it is touched."""
        for group, record in zip(self.layout.groups, self.records, strict=True):
            for one in group.tensors:
                at = group.starts[record] + one.start
                yield one.name, one.slot, self.file.mapped(at, one.shape, one.dtype)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights that count, mapped."""
        return {name: one for name, slot, one in self.mapped() if slot == WEIGHT}

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter, slot, tensor) of all optimizer states that count, mapped."""
        return ((name, slot, one) for name, slot, one in self.mapped() if slot != WEIGHT)

    def leave(self) -> None:
        """Back the module's parameters by the file, and let the file go with them."""
        self.progress.wait()
        self.parameters.leave(self._whole_weights() if self.shares.divides else self.weights())
        self.close()

    def _whole_weights(self) -> dict[str, Tensor]:
        """Return the weights of all ranks, mapped from a file of their own that goes with them."""
        params = self.parameters.params
        starts, size = {}, 0
        for name, one in params.items():
            starts[name] = size
            size += paged(one.nbytes)
        path = self.file.path.with_suffix(".weights")
        file = TierFile.create(path, size)
        try:
            for name, pages in self.parameters.gathered():
                file.write(starts[name], pages)
            return {name: file.mapped(starts[name], tuple(p.shape), p.dtype) for name, p in params.items()}
        finally:
            path.unlink()
            file.close()

    def keep(self) -> str:
        """Let the file stay at `close`, as that of a killed run does: this one has failed. Return a remark on it.

        It goes where no step of this run is in it: a checkpoint, or the start, has the same state.
        """
        self.is_kept = self.has_moved and not self.is_closed
        return (
            f"tiers: the state after the last step stays in {self.file.path} until the next run there "
            "(gossamer.sharding.read_tiers returns it)"
            if self.is_kept
            else ""
        )

    def close(self) -> None:
        """End what updates and remove the file, unless it is kept; what is mapped stays as long as it is used."""
        if self.is_closed:
            return
        self.is_closed = True
        self.updater.close()
        self.parameters.close()
        if not self.is_kept:
            remove_files(self.file.path)
        self.file.close()


def _write_first(
    group: TierGroup, params: Mapping[str, Tensor], rule: Optimizer, file: TierFile, shares: TierShares
) -> None:
    """Write the first record of a group, some tensors at a time."""
    for name in group.names:
        given = params[name].detach()
        states = {} if group.is_frozen else first_states(rule, {name: given}, shares).get(name, {})
        own = shares.own(name, given)
        for one in group.tensors:
            if one.name == name and one.nbytes:
                _write_tensor(file, group.starts[0] + one.start, own if one.slot == WEIGHT else states[one.slot])


def _write_tensor(file: TierFile, offset: int, tensor: Tensor) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    buffer = page_buffer(_FIRST_BYTES)
    for at in range(0, len(data), _FIRST_BYTES):
        part = data[at : at + _FIRST_BYTES]
        whole = -(-len(part) // 4096) * 4096
        buffer[: len(part)].copy_(part)
        file.write(offset + at, buffer[:whole])


def closing_order(walk: UnshardOrder, gradients: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the numbers of buckets in the order in which backward fills them, by the trace, so the same on all ranks.

    Those with parameters outside of units are last: nobody knows when these have all of their gradient.
    """
    place = {name: at for at, unit in enumerate(reversed(walk.units)) for name in unit.names}
    full = [max((place.get(name, len(walk.units)) for name in names), default=0) for names in gradients]
    return tuple(sorted(range(len(full)), key=lambda i: (full[i], i)))


def smallest_host(
    layout: TierLayout,
    walk: UnshardOrder,
    gradients: Sequence[Sequence[str]],
    *,
    is_all_open: bool,
    kept: Collection[str] = (),
) -> int:
    """Return the least bytes of buffers that a step needs: a window, and the gradients that are open at once.

    The gradients of a unit are made together, from the last unit to the first. Those of parameters outside of units are
    open from the start on. `is_all_open`: all are, as those of several micro-batches until the last of them. Several
    ranks need no more: they average buckets in the order in which they are filled (`closing_order`). `kept`: those
    whose gradient stays until all backward passes are over.
    """
    sizes = {frozenset(group.names): group.open_bytes for group in layout.trained}
    if is_all_open:
        return layout.window_bytes + sum(sizes.values())
    left = [set(names) for names in gradients]
    groups = [frozenset(names) for names in gradients]
    loose = walk.always.names | frozenset(kept)
    is_open = {i for i, names in enumerate(groups) if names & loose}
    most = sum(sizes[groups[i]] for i in is_open)
    for unit in reversed(walk.units):
        is_open |= {i for i, names in enumerate(groups) if names & unit.names}
        most = max(most, sum(sizes[groups[i]] for i in is_open))
        for i in list(is_open):
            left[i] -= unit.names - loose
            if not left[i]:
                is_open.discard(i)
    return layout.window_bytes + most
