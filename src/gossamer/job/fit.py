"""Whether a run fits the memory of its machines, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gossamer.job.memory_forecast import MemoryForecast, RankMemory
from gossamer.process.starter import copies_are_wanted
from gossamer.run.resources import memory, resident_bytes
from gossamer.spec.units import show_gib

_BUFFERS = 40 << 20  # of a worker besides: threads, sockets and messages, scratch of matmuls (docs/results/fit.json)
_TOUCHED = 40 << 20  # what a copy of a process with imports writes to of them, measured on Linux: 36 to 44 MiB
_USUAL_OWN, _USUAL_SHARED = 280 << 20, 112 << 20  # torch 2.13 and transformers on Linux: 432 MiB with the buffers


@dataclass(frozen=True, slots=True)
class ProcessBase:
    """What a process of the run takes before it has a tensor: bytes of its own, and of libraries, which all share."""

    own: int
    shared: int

    def of(self, processes: int, *, are_copies: bool) -> int:
        """Return the bytes of so many processes together; copies share what of their imports they do not write to."""
        imports = max(0, self.own - _BUFFERS - _TOUCHED) if are_copies else 0
        return self.shared + imports + processes * (self.own - imports)

    @staticmethod
    def measured() -> ProcessBase:
        """Return that of this process, which has imported what a worker imports."""
        own, shared = resident_bytes()
        return ProcessBase(own + _BUFFERS, shared)

    @staticmethod
    def usual() -> ProcessBase:
        """Return that of a worker as it was measured, for decisions on which all processes must agree."""
        return ProcessBase(_USUAL_OWN + _BUFFERS, _USUAL_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the run, with the ranks that run on it. `total`, `free`: bytes of memory; 0: not known.

    are_copies: its ranks are copies of one process that has imported for all.
    """

    name: str
    ranks: range
    total: int
    free: int
    are_copies: bool = False

    @staticmethod
    def here(ranks: range, base: ProcessBase) -> Machine:
        """Return this machine, with what this process will have given back by the time the run starts."""
        total, free = memory()
        free = min(total, free + base.own + base.shared)
        is_copied = len(ranks) > 1 and copies_are_wanted()
        return Machine(name="this machine", ranks=ranks, total=total, free=free, are_copies=is_copied)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory that a run needs beside what its machines have."""

    forecast: MemoryForecast
    base: ProcessBase
    machines: tuple[Machine, ...]

    def needed(self, machine: Machine, forecast: MemoryForecast | None = None) -> int:
        """Return the bytes that the processes on a machine need together."""
        ranks = (forecast or self.forecast).ranks
        processes = self.base.of(len(machine.ranks), are_copies=machine.are_copies)
        return processes + sum(ranks[rank].total for rank in machine.ranks)

    def lacking(self, forecast: MemoryForecast | None = None) -> list[Machine]:
        """Return the machines that have too little memory, whatever else runs there."""
        return [one for one in self.machines if one.total and self.needed(one, forecast) > one.total]

    @property
    def fits(self) -> bool:
        """Return whether every machine has the memory."""
        return not self.lacking()

    def told(self, changes: Sequence[Change]) -> dict[str, object]:
        """Return the verdict for people and programs; `changes`: what may be tried where the run does not fit."""
        found: dict[str, object] = {"fits": self.fits, "verdict": self._verdict(changes)}
        if self.forecast.unknown:
            found["not_counted"] = self.forecast.unknown
        found["by_rank"] = {name: _shown(one, self.base) for name, one in _alike(self.forecast.ranks).items()}
        found["machines"] = {
            one.name: f"needs {show_gib(self.needed(one))} of {_has(one)} for {_ranks(one.ranks)}"
            for one in self.machines
        }
        found["peak_bytes"] = [one.total + self.base.own + self.base.shared for one in self.forecast.ranks]
        return found

    def _verdict(self, changes: Sequence[Change]) -> str:
        lacking = self.lacking()
        if lacking:
            one = lacking[0]
            short = show_gib(self.needed(one) - one.total)
            return f"does not fit: {one.name} has {show_gib(one.total)}, {short} too little; {self._advice(changes)}"
        tight = [one for one in self.machines if one.free and self.needed(one) > one.free]
        if tight:
            one = tight[0]
            return (
                f"fits once other programs on {one.name} give back {show_gib(self.needed(one) - one.free)}: "
                f"{show_gib(one.free)} are free now"
            )
        if not all(one.total for one in self.machines):
            return "fits where the memory is known"
        return "fits"

    def _advice(self, changes: Sequence[Change]) -> str:
        """Return the first change with which the run fits, forecast like the run itself."""
        for change in changes:
            forecast = change.forecast()
            if forecast is not None and not self.lacking(forecast):
                most = max(self.needed(one, forecast) for one in self.machines)
                return f"it fits with {change.setting} ({show_gib(most)} then)"
        tried = ", ".join(change.setting for change in changes)
        beside = f" (none of these is enough: {tried})" if tried else ""
        return (
            "use more machines, a smaller model or data.sequence, or model.adapter: lora, which trains few parameters"
            + beside
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that takes less memory, and the forecast with it; None where it cannot be combined with the others."""

    setting: str
    forecast: Callable[[], MemoryForecast | None]


def _alike(ranks: Sequence[RankMemory]) -> Mapping[str, RankMemory]:
    """Return the ranks by name, neighbors that need the same as one."""
    found, first = dict[str, RankMemory](), 0
    for rank, one in enumerate(ranks):
        if rank + 1 == len(ranks) or ranks[rank + 1] != one:
            found[_ranks(range(first, rank + 1))] = one
            first = rank + 1
    return found


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _shown(one: RankMemory, base: ProcessBase) -> dict[str, str]:
    rows = {**one.categories(), "process": base.own + base.shared}
    shown = {name: show_gib(size) for name, size in rows.items() if size}
    return {**shown, "peak": show_gib(sum(rows.values()))}


def _has(machine: Machine) -> str:
    if not machine.total:
        return "memory that is not known"
    return f"{show_gib(machine.total)} ({show_gib(machine.free)} free)"
