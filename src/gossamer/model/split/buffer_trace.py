"""Trace of the buffers that a forward changes (running means): what changes them, and what depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossamer.model.split.dataflow import BufferUse, BufferWrite, CallOutput
from gossamer.model.split.trace_backends import changed

Nothing: frozenset[Any] = frozenset()


@dataclass
class BufferTrace:
    """A trace of the buffers of `module` through one forward. Positions are those of `DataFlow`."""

    module: nn.Module
    key: Callable[[Tensor], int]
    names: dict[int, str] = field(default_factory=dict)  # memory -> buffer
    put: dict[int, frozenset[CallOutput]] = field(
        default_factory=dict
    )  # memory of buffers -> unit outputs written to it
    stains: dict[int, frozenset[str]] = field(default_factory=dict)  # memory -> buffers that it is computed from
    changes: dict[str, set[BufferWrite]] = field(default_factory=dict)
    readers: dict[str, set[int]] = field(default_factory=dict)
    looks: dict[str, set[int]] = field(default_factory=dict)
    places: list[tuple[dict[str, Tensor | None], str, str]] = field(default_factory=list)  # dict, key, buffer name
    last: list[Tensor | None] = field(default_factory=list)  # the buffer tensor when last compared

    def __post_init__(self) -> None:
        canonical: dict[int, str] = {}
        for path, owner in self.module.named_modules():
            for leaf, tensor in owner._buffers.items():
                if tensor is not None:
                    name = canonical.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
                    self.names.setdefault(self.key(tensor), name)
                    self.places.append((owner._buffers, leaf, name))
                    self.last.append(tensor)

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> BufferAccess:
        """Return the buffers that an operator has read and changed, and the memory of its outputs."""
        outs = [self.key(x) for x in tree_leaves(out) if isinstance(x, Tensor)]
        names = [self.names[k] for x in changed(func, args, kwargs) if (k := self.key(x)) in self.names]
        return BufferAccess(self.read(tree_leaves((args, kwargs))), names, outs)

    def in_unit(self, step: BufferAccess, call: int) -> None:
        """Record an operator that ran in unit call number `call`."""
        for name in step.read:
            self.readers.setdefault(name, set()).add(call)
        for name in step.changed:
            self.changes.setdefault(name, set()).add(BufferWrite(call, False))

    def in_code(self, step: BufferAccess, position: int, values: frozenset[CallOutput]) -> bool:
        """Record an operator that ran between units, on tensors that depend on `values`.

        Returns whether it changed a buffer.
        """
        for key in step.outs:
            if key in self.names:
                if self.names[key] in step.changed:
                    self.put[key] = self.put.get(key, Nothing) | values
            elif step.read:
                self.stains[key] = self.stains.get(key, Nothing) | step.read
        for name in step.changed:
            self.changes.setdefault(name, set()).add(BufferWrite(position, True, values))
        return bool(step.changed)

    def look(self, step: BufferAccess, position: int) -> None:
        """Record that code between units reads a tensor value at `position`."""
        for name in step.read:
            self.looks.setdefault(name, set()).add(position)

    def read(self, held: Iterable[Any]) -> frozenset[str]:
        """Return the names of the buffers that the tensors in `held` depend on."""
        found: frozenset[str] = Nothing
        for key in (self.key(x) for x in held if isinstance(x, Tensor)):
            found |= self.stains.get(key, Nothing) | ({self.names[key]} if key in self.names else Nothing)
        return found

    def assigned(
        self, position: int, taint: Mapping[int, frozenset[CallOutput]], *, loose: bool
    ) -> Iterator[CallOutput]:
        """Record buffers that were replaced by another tensor; yield the unit outputs these tensors are computed from.

        `loose`: code between units assigned them, and not the unit call at `position`.
        """
        for i, (owner, leaf, name) in enumerate(self.places):
            now = owner.get(leaf)
            if now is self.last[i]:
                continue
            self.last[i] = now
            values: frozenset[CallOutput] = Nothing
            if now is not None:
                values = taint.get(self.key(now), Nothing) if loose else Nothing
                self.names.setdefault(self.key(now), name)
            self.changes.setdefault(name, set()).add(BufferWrite(position, loose, values))
            yield from values

    def uses(self) -> dict[str, BufferUse]:
        """Return the uses of all buffers that the forward read or changed."""
        names = self.changes.keys() | self.readers.keys() | self.looks.keys()
        return {
            name: BufferUse(*(frozenset(kind.get(name, ())) for kind in (self.changes, self.readers, self.looks)))  # type: ignore[arg-type]
            for name in sorted(names)
        }


@dataclass(frozen=True, slots=True)
class BufferAccess:
    """The buffer access of one operator.

    `read`: buffers that its arguments depend on; `changed`: buffers that it writes; `outs`: memory of its output
    tensors.
    """

    read: frozenset[str]
    changed: list[str]
    outs: list[int]
