"""ActivationSwap: what blocks save for the backward pass goes to a file, and is read ahead for it in reverse order.

Order:  forward writes on a thread, in the order in which tensors are saved; backward reads on another, in reverse. What
        has not been written when backward asks for it is handed out from memory, and not written.
Choice: each block swaps or is recomputed, whichever makes T_F + T_B the least (`units: auto`):
            T_F = max(comp_F, A / B);   T_B = max(comp_B + R, A / B)
        A bytes that swap, R seconds of forward of the blocks that do not, B bytes per second of the file with reads and
        writes at the same time, comp_F and comp_B seconds that forward and backward compute (`_swap_choice.py`, exact).
        All are measured before the first step, on a micro-batch of which everything swaps.
Memory: `host`, a hard limit of what is in flight: a staging buffer of 1 MiB, what waits to be written, what is read
        ahead. What has been handed to backward is its working memory, at most what one block saves in plain training.
File:   `file` bytes in `directory` for each rank, taken at the start. It has no name: it is gone when the run ends,
        however that ends.
Result: bit-equal to plain training. Weights, views of them, buffers and tensors of less than `least` bytes stay in
        memory; a storage that several tensors share is written once.
Paper:  Liao et al., Fuyou, arXiv 2403.06504, section on automatic activation swapping (swap or recompute by cost);
        Rajbhandari et al., ZeRO-Infinity, SC 2021, arXiv 2104.07857 (activations in a file).
Unlike the papers: the set of blocks is the best of all sets, not a prefix in the order of seconds per byte. Weights and
        updates that tiers move through the same disk are not in the model: with tiers fewer blocks should swap than it
        finds, so that `units` with names may be faster.
Stages: each rank has a file; of its units all swap that may (`units: auto` too), as a stage cannot run alone to be
        measured. `file` holds what the micro-batches save that are alive there at one time.
Good when: activations are most of the memory, and a block computes longer than its bytes take.
Not for:   CUDA devices, compiled models, beside recompute (it recomputes by itself) or
        fp8_activations: these are refused.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.side_effects import untouched
from gossamer.model.split.later_effects import changes_python
from gossamer.model.unit_forward import UnitForward
from gossamer.saver import Installed, Saver, Site
from gossamer.saver._recomputed_unit import RecomputedUnit
from gossamer.saver._swap_choice import SwapCosts, SwapUnit, fastest_set, seconds_of
from gossamer.saver._swap_store import SwapStore
from gossamer.saver._swapped_unit import SavedTensors, SwappedUnit, ToNowhere, ToStore
from gossamer.saver.recompute import recomputable
from gossamer.sharding import TierAccount
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest
from gossamer.spec.units import read_size, show_bytes, show_seconds
from gossamer.store.tier_file import TierFile, file_system, free_bytes, is_far, mixed_rate

_KEY = "plan.savers.activation_swap"
_CHOICES = ("auto", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSwap(Saver):
    """Activations in a file. `host`: the most bytes in flight; `file`: the bytes of the file, such as 4GiB.

    `directory`: where the file is; it must be on a disk of this machine. `least`: tensors with fewer bytes stay.
    `units`: auto swaps or recomputes each block, all swaps each; or the names of those that swap, the others being as
    in plain training.
    """

    is_exact: ClassVar[bool] = True
    with_sharded_parameters: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("recompute", "fp8_activations")

    host: str | int
    file: str | int
    directory: str
    least: str | int = "64KiB"
    units: str | tuple[str, ...] = "auto"

    def __post_init__(self) -> None:
        for name in ("host", "file", "least"):
            read_size(getattr(self, name), key=name)
        if isinstance(self.units, str) and self.units not in _CHOICES:
            raise bad_input(
                wanted="auto, all, or a list of units", got=repr(self.units), do="write units: auto", key="units"
            )

    @property
    def may_recompute(self) -> bool:
        """Return whether it recomputes units where that is faster."""
        return self.units == "auto"

    @property
    def folder(self) -> Path:
        """Return the directory of the file."""
        return Path(self.directory).expanduser()

    def install(self, module: nn.Module, site: Site) -> Installed:
        names = tuple(name for name in self._candidates(module, site) if name not in site.elsewhere)
        host, least = read_size(self.host, key="host"), read_size(self.least, key="least")
        _check_module(module)
        if site.is_outline:
            return Installed(remove=_Units(module, names, ToNowhere(host, least)).remove, objective=site.objective)
        store = self._store(TierAccount("host", host))

        try:
            units = _Units(module, names, ToStore(store, least))
        except BaseException:
            store.close()
            raise

        def remove() -> None:
            units.remove()
            store.close()

        try:
            told = self._settled(units, site, store)
        except BaseException:
            remove()
            raise
        if is_far(kind := file_system(self.folder)):
            told = f"{told}; {self.folder} is on a network file system ({kind}): each step waits for the network"
        return Installed(remove=remove, objective=site.objective, told=f"activation_swap: {told}")

    def _candidates(self, module: nn.Module, site: Site) -> tuple[str, ...]:
        """Return the names of the units that may swap. Raises BadInput for a name that is none."""
        if isinstance(self.units, str):
            return recomputable(module, site.units)
        unknown = next((name for name in self.units if name not in site.units), None)
        if unknown is not None:
            raise bad_input(
                wanted="names of units of the model",
                got=repr(unknown),
                do=nearest(unknown, tuple(site.units)),
                key=f"{_KEY}.units",
            )
        return self.units

    def _store(self, host: TierAccount) -> SwapStore:
        """Make the file. Raises BadInput where there is no room for it, or in `host` for a buffer."""
        size, there = read_size(self.file, key="file"), free_bytes(self.folder)
        if size > there:
            raise bad_input(
                wanted=f"{size} bytes ({show_bytes(size)}) for activations in {self.folder}",
                got=f"{there} bytes ({show_bytes(there)}) free",
                do="free space there, give a directory on a larger disk, or a smaller file",
                key=f"{_KEY}.directory",
            )
        path = self.folder / f"activations-{os.getpid()}-{secrets.token_hex(4)}.swap"
        file = TierFile.create(path, size, key=f"{_KEY}.directory")
        path.unlink()  # the open file stays; nothing is left of a run that is killed
        try:
            return SwapStore.of(file, host)
        except BaseException:
            file.close()
            raise

    def _settled(self, units: _Units, site: Site, store: SwapStore) -> str:
        """Measure a micro-batch of which all swaps, recompute the units for which that is faster; say what is done."""
        rate = mixed_rate(store.file)
        if site.batch is None or site.in_stages:  # a stage cannot run alone to be measured
            return f"{len(units.there)} units swap what they save, at {show_bytes(rate)}/s, as measured"
        for _ in range(2):  # the first one also allocates
            forward_s, backward_s = _run(units.module, site, store)
        costs, found = SwapCosts(forward_s=forward_s, backward_s=backward_s, rate=rate), units.measured()
        chosen: tuple[int, ...] = tuple(range(len(found)))
        if self.may_recompute:
            chosen = fastest_set(found, costs)
        names = [name for index, name in enumerate(units.there) if index not in chosen]
        why = ""
        if names:
            units.recompute(names)
            try:
                _run(units.module, site, store)
            except BadInput as error:  # of a unit that cannot run twice
                units.swap(names)
                names, chosen, why = [], tuple(range(len(found))), f", as one cannot ({error.message})"
        forward_s, backward_s = seconds_of(found, chosen, costs)
        moved = show_bytes(sum(found[index].size_bytes for index in chosen))
        return (
            f"{len(chosen)} of {len(found)} units swap {moved} per micro-batch at {show_bytes(rate)}/s, as measured, "
            f"and {len(names)} are recomputed{why}; forward should take {show_seconds(forward_s)}, backward "
            f"{show_seconds(backward_s)}"
        )


class _Units:
    """Units whose forward is another: they swap, or are recomputed."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], saved: SavedTensors) -> None:
        self.module, self._saved = module, saved
        self.there: dict[str, UnitForward] = {name: self._swapped(name) for name in names}

    def _swapped(self, name: str) -> UnitForward:
        return SwappedUnit(self.module.get_submodule(name), self._saved)

    def swap(self, names: Sequence[str]) -> None:
        """Have these units swap."""
        for name in names:
            self.there[name].put_back()
            self.there[name] = self._swapped(name)

    def recompute(self, names: Sequence[str]) -> None:
        """Have these units run again in the backward pass."""
        for name in names:
            self.there[name].put_back()
            self.there[name] = RecomputedUnit(self.module.get_submodule(name), name, is_outline=False)

    def measured(self) -> list[SwapUnit]:
        """Return the bytes and seconds of the last forward of every unit, all of which swap."""
        found = []
        for one in self.there.values():
            assert isinstance(one, SwappedUnit)
            may = not changes_python(one.unit)
            found.append(SwapUnit(size_bytes=one.size_bytes, seconds=one.seconds, can_recompute=may))
        return found

    def remove(self) -> None:
        """Give all units their own forward back."""
        while self.there:
            self.there.popitem()[1].put_back()


def _run(module: nn.Module, site: Site, store: SwapStore) -> tuple[float, float]:
    """Run forward and backward of a micro-batch without lasting effects; return the seconds, without waits."""
    assert site.batch is not None
    rows = {name: one.repeat(site.rows, *[1] * (one.dim() - 1)) for name, one in site.batch.items() if one.dim()}
    rows |= {name: one.clone() for name, one in site.batch.items() if not one.dim()}
    trained = [one for one in module.parameters() if one.requires_grad]
    with untouched(module), torch.enable_grad(), _without_gradients(trained), site.drawing():
        began, waited_s = time.perf_counter(), store.waited_s
        with site.computing():
            loss = site.objective(caller_of(module, rows)(module, rows), rows).float()
        between, waited_between_s = time.perf_counter(), store.waited_s
        loss.backward()  # type: ignore[no-untyped-call]
        ended = time.perf_counter()
    forward_s = between - began - (waited_between_s - waited_s)
    return forward_s, ended - between - (store.waited_s - waited_between_s)


@contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Drop each gradient as soon as it is made."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(drop) for one in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_module(module: nn.Module) -> None:
    if any(getattr(one, "_compiled_call_impl", None) is not None for one in module.modules()):
        raise bad_input(
            wanted="a model that is not compiled, of which each saved tensor is seen",
            got="model.compile true",
            do="set model.compile to false, or leave activation_swap out",
            key=_KEY,
        )
    kinds = sorted({one.device.type for one in module.parameters()} - {"cpu", "meta"})
    if kinds:
        raise bad_input(
            wanted="a model on the CPU, whose activations swap",
            got=f"a model on {kinds[0]}",
            do='hide the devices (CUDA_VISIBLE_DEVICES=""), or leave activation_swap out',
            key=_KEY,
        )
