"""Components that save and restore their own state, slice by slice, and the sources from which they restore it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.slices import REPLICATED, Extent, NamedSlice, Slice

TensorKind: TypeAlias = tuple[Extent, torch.dtype]


class SliceCopies(Enum):
    """The copies of a slice on other ranks, by which the writer of each is chosen."""

    REPLICATED = "the same on all ranks that hold it: any of them writes it"
    PER_REPLICA = "computed by each replica for itself: all slices of this kind are written by the same one"
    SHARDED = "rows of this rank alone: it writes them"
    SPARE = "rows that another rank writes"
    PRIVATE = "state of this rank: it writes it"

    @property
    def is_replicated(self) -> bool:
        """Return whether every rank that holds the tensor can write it for all."""
        return self in (SliceCopies.REPLICATED, SliceCopies.PER_REPLICA)

    @property
    def is_sharded(self) -> bool:
        """Return whether the slice is some rows of a sharded tensor."""
        return self in (SliceCopies.SHARDED, SliceCopies.SPARE)


@dataclass(frozen=True, slots=True)
class StateSlice:
    """A slice of a component's state: its name and place, the tensor as it lies in memory, and the copies elsewhere."""

    where: Slice
    tensor: Tensor
    copies: SliceCopies

    @staticmethod
    def whole(name: str, tensor: Tensor, copies: SliceCopies, replica: int = REPLICATED) -> StateSlice:
        """Return the slice that covers a complete tensor."""
        return StateSlice(Slice.whole(name, tuple(tensor.shape), replica), tensor, copies)

    @property
    def kind(self) -> TensorKind:
        """The shape of the complete tensor, and its dtype."""
        return self.where.shape, self.tensor.dtype

    @property
    def named(self) -> NamedSlice:
        """The slice as a checkpoint writer takes it."""
        return self.where, self.tensor


class StateSource(ABC):
    """The saved state of all ranks of a run, read slice by slice: a checkpoint on disk, or the memory of its ranks."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of the source in messages."""

    @property
    @abstractmethod
    def meta(self) -> Mapping[str, Any]:
        """The values saved beside the tensors."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def versions(self, name: str) -> tuple[int, ...]:
        """Return the stored versions of a tensor, sorted: -1 is the one shared by all ranks, r that of rank r."""

    @abstractmethod
    def kind(self, name: str, version: int = REPLICATED) -> TensorKind:
        """Return the shape and dtype of a stored tensor."""

    @abstractmethod
    def read(self, where: Slice) -> Tensor:
        """Return a slice of the tensor that `where` names, of the version `where.replica`."""

    def read_whole(self, name: str, version: int = REPLICATED) -> Tensor:
        """Return a complete tensor."""
        return self.read(Slice.whole(name, self.kind(name, version)[0], version))

    def check_against(self, expected: Mapping[str, TensorKind], *, elsewhere: Callable[[str], bool]) -> None:
        """Raise CheckpointMismatch where the replicated tensors are not those of `expected`.

        Tensors that are not expected may be stored where `elsewhere` returns true for the name. Tensors that differ per
        rank belong to ranks, not to a model, and are not compared.
        """
        stored = {
            name: self.kind(name)
            for name in sorted(self.names())
            if REPLICATED in self.versions(name) and (name in expected or not elsewhere(name))
        }
        other = [name for name in expected if name in stored and stored[name] != expected[name]]
        shown = [f"{n}: {_show(stored[n])}, wanted {_show(expected[n])}" for n in other]
        said = [
            _first("missing", [name for name in expected if name not in stored]),
            _first("not wanted", [name for name in stored if name not in expected]),
            _first("of another shape or dtype", shown),
        ]
        if any(said):
            raise CheckpointMismatch(
                f"{self.label} is a checkpoint of another model: of {len(expected)} tensors wanted and {len(stored)} "
                f"stored, {', '.join(text for text in said if text)}: give the model it was saved from"
            )


class Stateful(ABC):
    """A component of a run whose state is saved and restored; nothing else reads or writes tensors of its prefixes.

    Where one component's prefix begins with another's, a name belongs to the longer one.
    """

    prefixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def slices(self) -> Iterator[StateSlice]:
        """Yield the slices of the state that this rank holds."""

    def meta(self) -> Mapping[str, Any]:
        """Return the values to save beside the tensors, as plain JSON; the same on all ranks."""
        return {}

    def wanted(self, source: StateSource) -> Iterator[StateSlice]:
        """Yield the slices that `source` must hold, with the same shape and dtype, as tensors of all ranks."""
        return (one for one in self.slices() if one.copies is not SliceCopies.PRIVATE)

    def ignores(self, name: str) -> bool:
        """Return whether a stored tensor below a prefix, one that all ranks shared, need not be wanted by this rank."""
        return False

    def cause(self, source: StateSource, missing: frozenset[str]) -> str:
        """Return the reason why the tensors of `source` are not those wanted, if it lies here; "" if it does not."""
        return ""

    @abstractmethod
    def check(self, source: StateSource) -> None:
        """Check that `restore` can read all it needs; raises CheckpointMismatch, changes nothing."""

    @abstractmethod
    def restore(self, source: StateSource) -> str:
        """Restore the state in place from a source that passed `check`; return a note for the user, "" for none."""


def _show(kind: TensorKind) -> str:
    return f"{str(kind[1]).removeprefix('torch.')} {kind[0]}"


def _first(kind: str, names: list[str]) -> str:
    return f"{len(names)} {kind} (first: {names[0]})" if names else ""
