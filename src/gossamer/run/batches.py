"""Batches by global sample index: the samples of a step follow from arithmetic, so a run resumes at the exact one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gossamer.data import Order, SampleOrder, Sequences
from gossamer.data.pair_sequences import PairOrder
from gossamer.model.python_state.random_generators import generator_states
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Plan
from gossamer.sync import LocalStepSchedule

RankBatch = dict[str, Tensor]


class Batches(ABC):
    """A data set of numbered sequences. `len` counts them; `batch` stacks some along a leading batch dimension.

    `together`: neighbors that belong together, in any batch; `is_announced`: whether `announce` is of use.
    """

    together: int = 1
    is_announced: bool = False

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        """Return the sequences `indices`, stacked."""

    @abstractmethod
    def text_bytes(self, indices: np.ndarray[Any, Any]) -> int | None:
        """Return the bytes of text that the labels of these sequences stand for; None for data other than text."""

    def announce(self, indices: np.ndarray[Any, Any]) -> None:  # noqa: B027  (most have nothing to prepare)
        """Prepare the batch of these sequences, which is most probably the next one."""

    def order(self, seed: int) -> Order:
        """Return the order in which a run with this seed takes the sequences."""
        return SampleOrder(seed, len(self))

    def first(self, count: int) -> np.ndarray[Any, Any]:
        """Return the sequences that represent all of them, `count` at most, for an evaluation."""
        return np.arange(min(count, len(self)))


class WidenedBatches(Batches):
    """Batches of `inner` with more in each; a subclass adds it."""

    def __init__(self, inner: Batches) -> None:
        self.inner, self.together, self.is_announced = inner, inner.together, inner.is_announced

    def __len__(self) -> int:
        return len(self.inner)

    def text_bytes(self, indices: np.ndarray[Any, Any]) -> int | None:
        return self.inner.text_bytes(indices)

    def announce(self, indices: np.ndarray[Any, Any]) -> None:
        self.inner.announce(indices)

    def order(self, seed: int) -> Order:
        return self.inner.order(seed)

    def first(self, count: int) -> np.ndarray[Any, Any]:
        return self.inner.first(count)


class TextBatches(Batches):
    """The training or the validation sequences of a corpus."""

    def __init__(self, split: Sequences) -> None:
        self._split = split
        self.together = split.together

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        return self._split.batch(indices)

    def text_bytes(self, indices: np.ndarray[Any, Any]) -> int | None:
        return self._split.bytes_of(indices)

    def order(self, seed: int) -> Order:
        return self._split.order(seed)

    def first(self, count: int) -> np.ndarray[Any, Any]:
        return self._split.first(count)


class DatasetBatches(Batches):
    """A map-style torch dataset whose items are dictionaries of tensors (or of anything default_collate stacks).

    The dataset may have `together`, how many neighboring items belong together, and
    `sample_order(seed)`, an order of its own.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self.together = int(getattr(dataset, "together", 1))

    def order(self, seed: int) -> Order:
        own = getattr(self._dataset, "sample_order", None)
        if callable(own):
            found: Order = own(seed)
            return found
        if self.together == 1:
            return SampleOrder(seed, len(self))
        return PairOrder(SampleOrder(seed, len(self) // self.together), self.together)

    def first(self, count: int) -> np.ndarray[Any, Any]:
        return np.arange(min(count, len(self)) // self.together * self.together)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        items = [self._dataset[int(i)] for i in indices]
        try:
            stacked = default_collate(items)
        except (RuntimeError, TypeError, KeyError, IndexError) as error:
            raise _unlike(items, indices, error) from error
        if not isinstance(stacked, dict):
            raise bad_input(
                wanted="a dataset whose items are dictionaries, such as {input_ids, labels}",
                got=f"items of type {type(items[0]).__name__}",
                do="return a dict from __getitem__",
                key="data",
            )
        return stacked

    def text_bytes(self, indices: np.ndarray[Any, Any]) -> int | None:
        return None


def _unlike(items: Sequence[Any], indices: np.ndarray[Any, Any], error: Exception) -> BadInput:
    """Return the error about items of a dataset that do not stack: two of them by number, and how they differ."""
    kinds = [_kind(item) for item in items]
    other = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), 0)
    here, there = kinds[0], kinds[other]
    if isinstance(here, dict) and isinstance(there, dict):  # the entries that differ alone
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        here, there = ({name: kind.get(name, "missing") for name in names} for kind in (here, there))
    first, second = int(indices[0]), int(indices[other])
    got = f"{there} in item {second} and {here} in item {first}" if other else str(error).splitlines()[0]
    return bad_input(
        wanted="dataset items that can be stacked into a batch: the same keys, types and shapes",
        got=got,
        do="truncate or pad all items to one length, or correct the item that differs",
        key="data",
    )


def _kind(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {str(name): _kind(value) for name, value in item.items()}
    return tuple(item.shape) if isinstance(item, (Tensor, np.ndarray)) else type(item).__name__


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: rows of a step computed together. `key` is the global index of its first row in the step."""

    key: int
    rows: RankBatch


@dataclass(frozen=True, slots=True)
class Feed:
    """The data loader of one replica: its micro-batches, step by step, the same on all ranks of the replica.

    `replica`: index of the replica; `seed`: of the sample order; `only`: the micro-batches to fetch, None for all;
    `pace`: the steps that each replica takes part in. No sample is skipped when a replica sits out a step: the others
    take it.
    """

    batches: Batches
    plan: Plan
    replica: int
    seed: int
    only: frozenset[int] | None = None
    pace: LocalStepSchedule = field(default_factory=LocalStepSchedule)
    _early: dict[int, dict[int, MicroBatch]] = field(default_factory=dict)  # by step, of steps still to come

    def makes(self, step: int) -> bool:
        """Return whether this replica takes part in `step`."""
        return self.pace.makes(self.replica, step)

    def samples(self, step: int) -> tuple[int, int]:
        """Return the range [from, to) of global sample indices in `step`, over all ranks, as written to the records."""
        return self._before(step), self._before(step + 1)

    def _before(self, step: int) -> int:
        return sum(rows * self.pace.count(replica, step) for replica, rows in enumerate(self.plan.rows))

    def fetch(self, step: int) -> dict[int, MicroBatch]:
        """Return this replica's micro-batches in `step` (counted from 0), by the number of the micro-batch.

        The first one of the next step is announced where that is of use.
        """
        early = self._early.pop(step, None)
        return self._read(step) if early is None else early

    def look_ahead(self, step: int) -> Mapping[int, MicroBatch]:
        """Return the micro-batches of a step to come. They are kept for `fetch`, so the data set is read once.

        Raises BadInput for items that draw from the default generators: their numbers would follow from when they are
        read, and a resumed run would draw others.
        """
        before = generator_states()
        self._early[step] = self._read(step)
        if generator_states() != before:
            raise bad_input(
                wanted="a dataset whose items draw no random numbers of the default generators, where batches are read "
                "a step early",
                got=f"items of step {step} that do",
                do="draw from a generator that the item's index seeds, or set train.adversarial.ahead to false",
                key="data",
            )
        return self._early[step]

    def _read(self, step: int) -> dict[int, MicroBatch]:
        first_row = sum(self.plan.rows[: self.replica])
        found = {
            number: MicroBatch(first_row + row, self.batches.batch(indices))
            for number, row, indices in self._indices(step)
        }
        if self.batches.is_announced and self.makes(step + 1) and (ahead := self._indices(step + 1)):
            self.batches.announce(ahead[0][2])
        return found

    def _indices(self, step: int) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
        """Return number, first row and sequences of each micro-batch in `step`."""
        there = (rows for other, rows in enumerate(self.plan.rows[: self.replica]) if self.pace.makes(other, step))
        start = self._before(step) + sum(there)
        order = self.batches.order(self.seed)
        pieces = cut(self.plan.rows[self.replica], self.plan.microbatches[self.replica])
        borders = [0, *accumulate(pieces)]
        found = order(np.arange(start, start + borders[-1]))
        return [
            (number, a, found[a:b])
            for number, (a, b) in enumerate(pairwise(borders))
            if self.only is None or number in self.only
        ]


def cut(rows: int, pieces: int) -> list[int]:
    """Return the sizes of `pieces` parts of `rows` rows; sizes differ by at most one, larger ones first."""
    return [rows // pieces + (i < rows % pieces) for i in range(pieces)]


def part(total: int, rank: int, ranks: int) -> range:
    """Return the indices that `rank` gets when `total` items are divided evenly over `ranks`."""
    borders = [0, *accumulate(cut(total, ranks))]
    return range(borders[rank], borders[rank + 1])


def moved(rows: RankBatch, device: torch.device) -> RankBatch:
    """Return the batch with all its tensors on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in rows.items()}


def row_slices(total: int, largest: int) -> Sequence[slice]:
    """Return slices of at most `largest` rows that cover 0..total."""
    return [slice(a, min(a + largest, total)) for a in range(0, total, largest)]
