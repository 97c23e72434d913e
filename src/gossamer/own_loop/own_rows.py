"""A rank loads its own rows alone, where nobody can tell: the rows of a batch are made one by one, and draw nothing.

Random numbers that a data set draws are drawn for all rows of a batch, so that they are those of one process; and what
a collate function of the loop's own makes of a batch may depend on all of its rows. Where neither is so, seen in the
first batches, a rank fetches what it computes on, and one more row of each batch, the same on all ranks: its numbers
are in the fingerprint of the batch, beside the indices. A data set that gives something else the second time shows.
Where one begins to draw later, its batch is loaded once more, whole, from the generators as they were.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from gossamer.own_loop.batches import Divider, Share, fingerprint, leaves

_WHOLE = 2  # batches that are loaded whole, to see what a data set does
_LOOKED_AT = 1000  # objects of a data set
_FEW = 64  # things in a container: more are data
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "torchvision", "PIL", "pandas"}


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What was asked of the data set for one batch: rows `start` to `stop` of `whole`, and the one that all ranks look
    at, which is at `shown` of what was fetched. `states`: of the generators before.
    """

    whole: int
    start: int
    stop: int
    shown: int
    indices: list[Any]  # of all rows
    print: int  # 32 bits of them
    states: _States
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _States:
    """Of the generators that everybody draws from, and what a data set keeps beside its rows: numbers and words."""

    torch: bytes
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    own: tuple[tuple[dict[str, Any], dict[str, Any]], ...]  # attributes, and those of them that are plain

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _States):
            return NotImplemented
        mine, theirs = self.numpy, other.numpy
        return (
            (self.torch, self.python, mine[2:]) == (other.torch, other.python, theirs[2:])
            and bool((mine[1] == theirs[1]).all())
            and all(a == b for (_, a), (_, b) in zip(self.own, other.own, strict=True))
        )


class OwnRows:
    """The batches of one DataLoader, whole at first and this rank's rows of them as soon as these are known to be all
    that it needs. One for the life of a loop.
    """

    def __init__(self, loader: DataLoader[Any], divider: Divider) -> None:
        self._loader, self._divider = loader, divider
        self._state = [vars(one) for one in _reached(loader.dataset) if hasattr(one, "__dict__") and not _is_code(one)]
        self._seen = 0  # batches that were loaded whole
        self._last: _Drawn | None = None
        self._draws = False  # or gives what is not one row after the other

    @staticmethod
    def serve(loader: Any, divider: Divider | None) -> bool:
        """Whether the rows of its batches may be made one by one, as far as the loader says it."""
        return (
            type(loader) is DataLoader
            and divider is not None
            and divider.rows is None
            and loader.num_workers == 0
            and loader.batch_sampler is not None
            and loader.collate_fn is default_collate
            and _gives_rows(loader.dataset)
            and not any(isinstance(one, _GENERATORS) for one in _reached(loader.dataset))
        )

    def shares(self, last: int | None) -> Iterator[Share]:
        """One pass over the loader, of so many batches."""
        loader: DataLoader[Any] = DataLoader(
            self._loader.dataset,
            batch_sampler=_Asking(self),
            collate_fn=self._loader.collate_fn,
            pin_memory=self._loader.pin_memory,
            generator=self._loader.generator,
        )
        for index, batch in enumerate(loader):
            drawn, self._last = self._last, None
            assert drawn is not None
            yield self._share(batch, drawn, is_last=last is None or index >= last - 1)

    def asked(self) -> Iterator[list[Any]]:
        """The indices of one batch after the other, or those of this rank's rows."""
        batches: Iterable[Sequence[Any]] = self._loader.batch_sampler  # type: ignore[assignment]
        for every in batches:
            indices = list(every)
            whole, printed = len(indices), zlib.crc32(repr(indices).encode())
            start, stop = self._divider.bounds(whole)
            is_whole = self._draws or self._seen < _WHOLE or whole < len(self._divider.parts)
            shown = printed % whole if whole else 0
            mine = indices
            if not is_whole:
                is_mine = start <= shown < stop
                mine = indices[start:stop] + ([] if is_mine else [indices[shown]])
                shown = shown - start if is_mine else stop - start
            self._last = _Drawn(whole, start, stop, shown, indices, printed, self._states(), is_whole)
            yield mine

    def _share(self, batch: Any, drawn: _Drawn, *, is_last: bool) -> Share:
        is_drawn = self._states() != drawn.states
        if drawn.is_whole:
            share = self._divider.share(batch, is_last=is_last)
            is_first = share.dims is not None and not any(share.dims.values())
            self._draws |= is_drawn or not is_first or not _is_of_tensors(batch, drawn.whole)
            self._seen += 1
            return share if self._draws else replace(share, mark=self._mark(batch, drawn))
        if is_drawn:  # for the first time: once more, for all of its rows
            _put_back(drawn.states)
            self._draws = True
            batch = default_collate([self._loader.dataset[index] for index in drawn.indices])
            return self._divider.share(batch, is_last=is_last)
        rows = drawn.stop - drawn.start
        dims = {path: 0 for path, _ in leaves(batch)}
        return Share(self._divider.rows_of(batch, slice(0, rows)), rows, drawn.whole, self._mark(batch, drawn), dims)

    def _states(self) -> _States:
        return _States(
            torch.default_generator.get_state().numpy().tobytes(),
            random.getstate(),
            np.random.get_state(legacy=True),  # type: ignore[arg-type]
            tuple((own, {n: one for n, one in own.items() if isinstance(one, _PLAIN)}) for own in self._state),
        )

    def _mark(self, batch: Any, drawn: _Drawn) -> int:
        shown = self._divider.rows_of(batch, slice(drawn.shown, drawn.shown + 1))
        return zlib.crc32(fingerprint(shown).to_bytes(4, "big"), drawn.print)


class _Asking:
    """A sampler of batches."""

    def __init__(self, rows: OwnRows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[list[Any]]:
        return self._rows.asked()


def _gives_rows(data: Any) -> bool:
    """Whether it is asked for one row at a time, or is known to make no difference."""
    if isinstance(data, IterableDataset) or not isinstance(data, Dataset):
        return False
    if type(data) is Subset:
        return _gives_rows(data.dataset)
    return type(data) is TensorDataset or not hasattr(data, "__getitems__")


def _is_code(held: Any) -> bool:
    return isinstance(held, type | FunctionType)


def _is_of_tensors(batch: Any, rows: int) -> bool:
    """Whether everything in a batch is a tensor with its rows first."""
    held = [leaf for _, leaf in leaves(batch)]
    return all(isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == rows for one in held)


def _put_back(states: _States) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    for own, plain in states.own:
        own.update(plain)


def _reached(data: Any) -> Iterator[Any]:
    """What a data set holds, and the code of its classes names: attributes, small containers, functions."""
    waiting, seen = deque([data]), set[int]()
    while waiting and len(seen) < _LOOKED_AT:
        held = waiting.popleft()
        if id(held) in seen or isinstance(held, (*_PLAIN, Tensor, np.ndarray, ModuleType)):
            continue
        seen.add(id(held))
        yield held
        if isinstance(held, Mapping):
            waiting.extend(itertools.islice(held.values(), _FEW))
        elif isinstance(held, list | tuple | set):
            waiting.extend(itertools.islice(held, _FEW))
        elif isinstance(held, functools.partial):
            waiting.extend((held.func, held.args, held.keywords))
        elif isinstance(held, MethodType):
            waiting.extend((held.__self__, held.__func__))
        elif isinstance(held, FunctionType):
            cells = [cell.cell_contents for cell in held.__closure__ or () if cell != CellType()]
            named = [held.__globals__[name] for name in held.__code__.co_names if name in held.__globals__]
            waiting.extend((*cells, *named, held.__defaults__))
        elif isinstance(held, type):
            waiting.extend(one for one in vars(held).values() if isinstance(one, FunctionType | staticmethod))
        elif not isinstance(held, _GENERATORS) and type(held).__module__.partition(".")[0] not in _LIBRARIES:
            waiting.extend((getattr(held, "__dict__", None), type(held)))
        elif isinstance(held, Dataset) or type(held).__module__.startswith("torchvision"):
            waiting.append(getattr(held, "__dict__", None))
