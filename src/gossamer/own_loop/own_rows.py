"""Row-wise loading: a rank loads only its own rows of each batch if the dataset makes rows one by one and draws no
random numbers.

Random numbers that a dataset draws are drawn for all rows of a batch, so that they are those of one process; and the
user's collate function may depend on all rows. If the first batches show neither, a rank fetches its own rows and one
more row of each batch, the same on all ranks. That row and the indices are hashed into the fingerprint of the batch, so
a dataset that returns different data the second time is detected. If a dataset starts to draw later, that batch is
loaded again in full, from the earlier generator states.
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

from gossamer.own_loop.batch_fingerprint import fingerprint
from gossamer.own_loop.batch_structure import leaves
from gossamer.own_loop.batches import Divider, Share

_WHOLE = 2  # batches loaded in full, to observe the dataset
_LOOKED_AT = 1000  # objects of a dataset to inspect, at most
_FEW = 64  # items inspected in a container; more are data
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "torchvision", "PIL", "pandas"}


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The rows fetched from the dataset for one batch: `start` to `stop` of `whole`, and the row that all ranks
    compare, at index `shown` of the fetched rows. `states`: of the random generators before.
    """

    whole: int
    start: int
    stop: int
    shown: int
    indices: list[Any]  # of all rows
    print: int  # 32-bit hash of the indices
    states: _States
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _States:
    """The states of the global random generators, and the plain attributes that a dataset keeps besides its rows."""

    torch: bytes
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    own: tuple[tuple[dict[str, Any], dict[str, Any]], ...]  # attributes, and the plain ones among them

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
    """The batches of one DataLoader: loaded in full at first, then this rank's rows alone once they are known to
    suffice. One instance serves the whole loop.
    """

    def __init__(self, loader: DataLoader[Any], divider: Divider) -> None:
        self._loader, self._divider = loader, divider
        self._state = [vars(one) for one in _reached(loader.dataset) if hasattr(one, "__dict__") and not _is_code(one)]
        self._seen = 0  # batches loaded in full
        self._last: _Drawn | None = None
        self._draws = False  # or a batch is not row by row

    @staticmethod
    def serve(loader: Any, divider: Divider | None) -> bool:
        """Return whether the loader's settings allow its rows to be loaded one by one."""
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
        """Yield this rank's part of each batch of one pass over the loader; `last`: its number of batches, if known."""
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
        """Yield the dataset indices to fetch for each batch: all of them, or this rank's rows."""
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
        if is_drawn:  # for the first time: load all rows of the batch again
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
    """The batch sampler that asks an OwnRows for indices."""

    def __init__(self, rows: OwnRows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[list[Any]]:
        return self._rows.asked()


def _gives_rows(data: Any) -> bool:
    """Return whether the dataset is indexed one row at a time, or is known to give the same either way."""
    if isinstance(data, IterableDataset) or not isinstance(data, Dataset):
        return False
    if type(data) is Subset:
        return _gives_rows(data.dataset)
    return type(data) is TensorDataset or not hasattr(data, "__getitems__")


def _is_code(held: Any) -> bool:
    return isinstance(held, type | FunctionType)


def _is_of_tensors(batch: Any, rows: int) -> bool:
    """Return whether every leaf of a batch is a tensor with its rows in the first dimension."""
    held = [leaf for _, leaf in leaves(batch)]
    return all(isinstance(one, Tensor) and one.dim() > 0 and one.shape[0] == rows for one in held)


def _put_back(states: _States) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    for own, plain in states.own:
        own.update(plain)


def _reached(data: Any) -> Iterator[Any]:
    """Yield the objects that a dataset holds, and that the code of its classes names: attributes, small containers,
    functions.
    """
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
