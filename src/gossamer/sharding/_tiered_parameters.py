"""Parameters in a tier file: a unit's weights are in memory while it runs, those of the units to come are read ahead.

The order in which units run, forward and backward, is that of the step before, and of a trace before the first one. A
step that takes another order is right all the same: what was not read ahead is read when it is needed, and its order is
the one expected from then on. A parameter that is not there is backed by a single NaN, as in `_sharded_parameters`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.comm.comm_thread import CommThread
from gossamer.sharding._access_trace import tensors_of
from gossamer.sharding._sharded_parameters import WrappedForward, entry_nodes, hollow
from gossamer.sharding._tier_limits import TierAccount
from gossamer.sharding._tier_shares import (
    TierShares,
    UnitCompletion,
    UnitUnderWay,
    WeightGather,
    WholeUnits,
    unit_bytes,
)
from gossamer.sharding._tile_reader import TileReader, largest_tile
from gossamer.sharding._tiled_weight import TiledWeight
from gossamer.sharding._unshard_order import UnshardOrder, UnshardUnit
from gossamer.store.tier_file import PageMemory, TierFile, paged

Offsets = Callable[[str], int]  # where the weights of a parameter that count start in the file
_NEAR = 2  # units ahead for which others that are needed later make room


@dataclass(slots=True)
class TieredParameters:
    """The parameters of a module that lie in a tier file. One thread reads, straight to where they are used.

    `params`: those of the module, in stages those of this rank's stages.
    """

    module: nn.Module
    params: Mapping[str, Tensor]
    file: TierFile
    offset_of: Offsets
    room: TierAccount
    shares: TierShares
    completion: UnitCompletion
    always: _FileUnit
    units: tuple[_FileUnit, ...]
    expected: list[tuple[int, bool]]  # (unit, whether forward) of a step, in order
    retraced: int = 0  # steps that took another order than expected
    exposed_s: float = 0.0  # seconds waited for reads since it was last set to 0
    read_bytes: int = 0
    tiles: TileReader | None = None
    _seen: list[tuple[int, bool]] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    _real: list[tuple[nn.Module, Callable[..., Any] | None]] = field(default_factory=list)
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gossamer-tier-read"))

    @staticmethod
    def of(
        module: nn.Module,
        params: Mapping[str, Tensor],
        walk: UnshardOrder,
        file: TierFile,
        offset_of: Offsets,
        room: TierAccount,
        passes: Sequence[bool] = (True, False),
        tiled: Sequence[TiledWeight] = (),
        *,
        shares: TierShares,
        pump: CommThread,
    ) -> TieredParameters:
        """Take the parameters `params` of `module` out of memory; the file must hold them already.

        `passes`: whether each pass of a step over these units is a forward, in the order in which they are expected.
        `tiled`: those of which a tile is in memory at one time. `shares`: which of them the file has; `pump` brings
        the others, if there are any.
        """
        walk = walk.without_tiled(params)
        everything = (walk.always, *walk.units)
        always, *units = (_FileUnit.of(unit, params) for unit in everything)
        there = [(i, True) for i in range(len(units))]
        back = [(i, False) for i in reversed(range(len(units))) if walk.units[i].goes_back]
        names = tuple(unit.name or "the weights outside of units" for unit in everything)
        completion = WeightGather(shares, pump, names) if shares.divides else WholeUnits()
        expected = [one for is_forward in passes for one in (there if is_forward else back)]
        found = TieredParameters(
            module, params, file, offset_of, room, shares, completion, always, tuple(units), expected
        )
        for index, unit in enumerate(walk.units):
            found._wrap(module.get_submodule(unit.name), functools.partial(found._unit, index))
        found._wrap(module, found._whole)
        if tiled:
            found.tiles = TileReader.of(tiled, params, file, offset_of, room, found._waited)
        return found

    def _waited(self, seconds: float) -> None:
        self.exposed_s += seconds

    def _wrap(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._real.append((module, vars(module).get("forward")))
        module.forward = WrappedForward(module.forward, run)  # type: ignore[method-assign]

    def _whole(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._fetch([self.always])
        return real(*args, **kwargs)

    def _unit(self, index: int, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_forward = torch._C._current_graph_task_id() == -1  # else backward computes it once more
        given = {id(one): one.grad_fn for one in tensors_of((args, kwargs))}
        self._enter(index, is_forward=is_forward)
        self._running.append(index)
        try:
            output = real(*args, **kwargs)
        finally:
            self._running.pop()
        if torch.is_grad_enabled():
            for one in tensors_of(output):  # but for what it was given and returns as it was
                if one.grad_fn is not None and given.get(id(one)) is not one.grad_fn:
                    for node in entry_nodes(one):
                        node.register_prehook(functools.partial(self._before_backward, index))
        return output

    def _before_backward(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        self._enter(index, is_forward=False)

    def _enter(self, index: int, *, is_forward: bool) -> None:
        """Have the weights of a unit in memory, let go of those that are not needed soon, and read ahead."""
        if not self._seen or self._seen[-1] != (index, is_forward):  # a unit of several outputs is entered at each
            self._seen.append((index, is_forward))
        ahead = self._ahead()
        self._fetch([self.units[index]], ahead)
        for place, following in enumerate(ahead):
            unit = self.units[following]
            while unit.is_away and not self._start(unit):
                if place >= _NEAR or not self._drop_furthest([self.units[index], unit], ahead, after=place):
                    return

    def _ahead(self) -> list[int]:
        """Return the units expected after the last one entered, nearest first, each once."""
        done = len(self._seen)
        if self.expected[:done] == self._seen:
            rest = self.expected[done:]
        else:
            last = self._seen[-1]
            rest = self.expected[self.expected.index(last) + 1 :] if last in self.expected else []
        return list(dict.fromkeys(index for index, _ in rest))

    def _fetch(self, wanted: Sequence[_FileUnit], ahead: Sequence[int] = ()) -> None:
        """Have units in memory; what others hold that are needed later, or not at all, makes room for them."""
        for i, unit in enumerate(self.units):
            if i not in self._running and unit not in wanted and i not in ahead:
                self._release(unit)
        for unit in wanted:
            while unit.is_away and not self._start(unit):
                fits = self._drop_furthest(wanted, ahead)
                assert fits, f"device: {unit.nbytes} bytes of a unit do not fit {self.room.limit} beside what runs"
        began = time.perf_counter()
        for unit in wanted:
            unit.wait()
        self.exposed_s += time.perf_counter() - began

    def _drop_furthest(self, kept: Collection[_FileUnit], ahead: Sequence[int], after: int = -1) -> bool:
        """Let go of the unit needed last, and later than `ahead[after]`; return whether there was one."""
        place = {index: at for at, index in enumerate(ahead)}
        there = [i for i, u in enumerate(self.units) if not u.is_away and u not in kept and i not in self._running]
        furthest = max(there, key=lambda i: place.get(i, len(ahead)), default=-1)
        if furthest < 0 or place.get(furthest, len(ahead)) <= after:
            return False
        self._release(self.units[furthest])
        return True

    def _start(self, unit: _FileUnit) -> bool:
        """Start to read a unit, if there is room for it; return whether there was."""
        if not self.room.try_take(unit.nbytes):
            return False
        if not unit.params:
            unit.is_there = True
            return True
        has = {name: self.shares.has(name, one.shape) for name, one in unit.params.items()}
        pieces = [(self.offset_of(name), pages) for name, pages in unit.pages.items() if has[name]]
        others = [pages for name, pages in unit.pages.items() if not has[name]]
        number = 0 if unit is self.always else 1 + self.units.index(unit)
        read = self._reader.submit(self._read, pieces, others)
        unit.under_way = self.completion.begin(number, unit.memory.buffer, read)
        return True

    def finish(self) -> None:
        """Say that this rank runs no more units before ranks meet; raises RunFailed where others do. All ranks call it.

        Without it a rank that waits for weights, and one that waits for gradients, would wait for each other.
        """
        began = time.perf_counter()
        self.completion.finish()
        self.exposed_s += time.perf_counter() - began

    def _read(self, pieces: list[tuple[int, Tensor]], others: Sequence[Tensor] = ()) -> None:
        """Read whole pages at several places, neighbors with one request; set those of `others` to zero.

        Beside an update, whose requests are whole records, each small one waits its turn: 32 MiB came in 0.29 s in
        pieces of 4 MiB, and in 0.08 s in pieces of 16 MiB, while no fewer bytes moved in all.
        """
        for start, buffers in _spans(pieces):
            self.file.read(start, *buffers)
            self.read_bytes += sum(len(one) for one in buffers)
        for pages in others:
            pages.zero_()

    def _release(self, unit: _FileUnit) -> None:
        if not unit.is_away:
            unit.wait()
            unit.close()
            self.room.give(unit.nbytes)

    def release(self) -> None:
        """Let go of all weights. The order of what has run since the last call is expected from now on."""
        for unit in (self.always, *self.units):
            self._release(unit)
        if any(not is_forward for _, is_forward in self._seen):  # an evaluation is no step
            self.retraced += self._seen != self.expected
            self.expected = self._seen
        self._seen = []

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in their pages, unit by unit; each is there until the next one is asked for."""
        self.release()
        for unit in (self.always, *self.units):
            self._fetch([unit])
            yield from unit.pages.items()
            self._release(unit)

    def leave(self, mapped: Mapping[str, Tensor]) -> None:
        """Back all parameters by `mapped`, the file's memory, and restore the module's forwards."""
        self.release()
        for unit in (self.always, *self.units):
            for name, param in unit.params.items():
                param.data = mapped[name]
        if self.tiles is not None:
            self.tiles.leave(mapped)
        self.close()

    def close(self) -> None:
        """Restore the module's forwards and end the thread that reads."""
        while self._real:
            module, before = self._real.pop()
            if before is None:
                del module.forward
            else:
                module.forward = before  # type: ignore[method-assign]
        self._reader.shutdown()
        if self.tiles is not None:
            self.tiles.close()


def _spans(pieces: Sequence[tuple[int, Tensor]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (start, pages in their order) of pieces that lie in neighboring pages."""
    start = end = -1
    inside: list[Tensor] = []
    for offset, pages in sorted((p for p in pieces if len(p[1])), key=lambda piece: piece[0]):
        if offset != end and inside:
            yield start, inside
            inside = []
        if not inside:
            start = offset
        inside.append(pages)
        end = offset + len(pages)
    if inside:
        yield start, inside


@dataclass(slots=True, eq=False)
class _FileUnit:
    """The parameters of a unit, in one piece of memory that is there from a read until `close` only.

    Each starts with a page, as in the file. So it is aligned as the allocator's tensors are: kernels round in another
    way at other places.
    """

    params: Mapping[str, Tensor]
    memory: PageMemory
    views: dict[str, Tensor]
    pages: dict[str, Tensor]  # of each, as bytes
    nbytes: int
    under_way: Future[None] | UnitUnderWay | None = None
    is_there: bool = False

    @staticmethod
    def of(unit: UnshardUnit, params: Mapping[str, Tensor]) -> _FileUnit:
        named = {name: params[name] for name in sorted(unit.names)}
        nbytes = unit_bytes(unit)
        memory, views, pages, at = PageMemory.of(nbytes), dict[str, Tensor](), dict[str, Tensor](), 0
        for name, param in named.items():
            pages[name] = memory.buffer[at : at + paged(param.nbytes)]
            views[name] = pages[name][: param.nbytes].view(param.dtype).view(param.shape)
            at += paged(param.nbytes)
        found = _FileUnit(named, memory, views, pages, nbytes)
        found.close()
        return found

    @property
    def is_away(self) -> bool:
        """Return whether no memory is held for it."""
        return not self.is_there and self.under_way is None

    def wait(self) -> None:
        """Wait until the weights are there. Raises the error of the read."""
        if self.under_way is None:
            return
        self.under_way.result()
        self.under_way, self.is_there = None, True
        for name, view in self.views.items():
            self.params[name].data = view

    def close(self) -> None:
        """Free the memory."""
        self.is_there = False
        for param in self.params.values():
            param.data = hollow(param)
        self.memory.free()


def smallest_device(walk: UnshardOrder, params: Mapping[str, Tensor], tiled: Sequence[TiledWeight] = ()) -> int:
    """Return the bytes of the weights that one unit needs beside those that stay for the whole step, and two tiles."""
    walk = walk.without_tiled(params)
    return unit_bytes(walk.always) + max(map(unit_bytes, walk.units), default=0) + 2 * largest_tile(tiled, params)
