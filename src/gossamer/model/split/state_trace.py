"""Trace of Python state through one forward: what reads and changes it, and what changes late in the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from gossamer.model.python_state.record import Difference, Root
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.call_trace import CallTrace
from gossamer.model.split.dataflow import FIRST, KEPT, LateWrite, PythonStateUse
from gossamer.model.split.object_paths import ways_to
from gossamer.model.split.python_effects import BEGINNING, OF_TORCH, PythonEffects, Reads, unseen
from gossamer.model.split.traced_call import TracedCall


@dataclass
class StateTrace:
    """A trace of the Python state of `module` through the forward with the unit calls `calls`."""

    module: nn.Module
    calls: CallTrace
    early: dict[float, Snapshot] = field(default_factory=dict)  # Python state at the start, and at each value read
    stirred: list[tuple[float, Difference, float]] = field(default_factory=list)  # changes before a value read, where
    stirs: set[float] = field(default_factory=set)  # when the code between units changes lasting tensors
    late: tuple[LateWrite, ...] = ()

    def __post_init__(self) -> None:
        self.reads = Reads(self.calls.now)

    def note(self, at: float) -> None:
        """Take a snapshot of Python state before a value read at `at`, and of what has changed until then."""
        if at not in self.early:
            with unseen():
                if FIRST in self.early:
                    self.stirred += [(at, one, self._written(one)) for one in self.early[FIRST].differences()]
                self.early[at] = Snapshot.of_python(self.module, "")

    def finish(self) -> None:
        """Find what the forward has changed late, and drop the snapshots."""
        with unseen():
            self.late = tuple(self._late())
        self.early.clear()

    def use(self) -> PythonStateUse:
        """Return what was traced, for the data flow."""
        return PythonStateUse(
            late=self.late,
            stirred=self._early_writes(),
            stirs=frozenset(self.stirs | self.reads.put),
            touched=frozenset(self.path(root) for root in self.reads.touched),
            looked_into={self.path(root): frozenset(self.reads.others(root, -1)) for root in self.reads.of},
            kept=self._by_call(lambda effects: (self.path(root) for root in effects.kept)),
            left=self._by_call(lambda effects: effects.left),
        )

    def _early_writes(self) -> tuple[LateWrite, ...]:
        """Return the state that the forward changes before it reads a tensor value."""
        held = {id(one.holder) for _, one, _ in self.stirred if one.holder is not None and one.root is not None}
        ways = ways_to(held, self.module, OF_TORCH, None) if held else {}
        return tuple(
            LateWrite(one.name, self._readers({*ways.get(id(one.holder), ()), one.root}), written, at)
            for at, one, written in self.stirred
        )

    def effects(self, number: int, seen: TracedCall) -> tuple[str, ...]:
        """Return the side effects of a call that others may read.

        If its outputs may change in kind with state that only it reads, return all.
        """
        ids = {path: key for key, path in self.calls.paths.items()}
        followed = {(ids[i.module], i.attribute) for i in seen.insides if i.attribute and i.container != KEPT}
        found = [*seen.effects.outside(number, self.reads, followed)]
        if not found and not seen.looked and len(seen.leaves) > 1:
            found = seen.effects.found
        return tuple(dict.fromkeys(one.name for one in found))

    def _by_call(self, names: Callable[[PythonEffects], Iterable[str]]) -> dict[str, frozenset[int]]:
        """Return `names` of the Python effects of every call, each with the calls that have it."""
        found: dict[str, set[int]] = {}
        for number, seen in enumerate(self.calls.traced):
            for name in names(seen.effects):
                found.setdefault(name, set()).add(number)
        return {name: frozenset(at) for name, at in sorted(found.items())}

    def path(self, root: Root) -> str:
        """Return the path of a module attribute from the root module."""
        path = self.calls.paths.get(root[0], "")
        return f"{path}.{root[1]}" if path else root[1]

    def _late(self) -> Iterator[LateWrite]:
        for root, at in self.reads.late():
            yield LateWrite(self.path(root), self._readers([root]), at)
        changed = [(at, one) for at, early in self.early.items() for one in early.differences()]
        changed = [(at, one) for at, one in changed if one.root is None or one.root[1] not in OF_TORCH]
        held = {id(one.holder) for _, one in changed if one.holder is not None and one.root is not None}
        ways = ways_to(held, self.module, OF_TORCH, None) if held else {}
        for at, one in changed:
            if one.holder is not None or one.root not in self.reads.renewed:
                readers = self._readers({*ways.get(id(one.holder), ()), one.root})
                yield LateWrite(one.name, readers, self._written(one), at)

    def _readers(self, ways: Iterable[Root | None]) -> frozenset[float]:
        """Return the readers of a piece of state in the next forward."""
        found = (self.reads.others(way, -1) if way is not None else {BEGINNING} for way in ways)
        return frozenset(reader for some in found for reader in some)

    def _written(self, one: Difference) -> float:
        """Return the last call that changed it; the end of the forward if no unit did."""
        changed = (any(d.name == one.name for d in seen.effects.found) for seen in self.calls.traced)
        return max((number for number, is_it in enumerate(changed) if is_it), default=float(self.calls.position))
