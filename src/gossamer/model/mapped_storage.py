"""Tensor memory in files, for a model that is built as a whole and is too large for its share of the machine's memory.

The files have no name (they are unlinked as soon as they are mapped), so nothing is left if a process dies. They hold
tensor data alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_gib

_SMALL = 1 << 20  # bytes; such tensors stay in memory


@contextmanager
def mapped(beyond_bytes: int) -> Iterator[set[int]]:
    """Put large CPU tensors made in this context into files, once live tensors hold `beyond_bytes`.

    Yields the addresses of such memory.
    """
    with _Mapping(beyond_bytes) as mapping:
        yield mapping.places


def into_memory(tensors: Iterable[Tensor], places: Collection[int]) -> None:
    """Move tensors from files into memory, in place, as trained tensors must not be written to a disk all the time.

    `places`: the addresses that `mapped` yields.
    """
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in places:
            tensor.data = tensor.data.clone()


def file_memory(size_bytes: int) -> torch.UntypedStorage:
    """Return storage of zeros in a file without a name, in the folder for temporary files.

    Raises BadInput if the disk is full.
    """
    handle, path = tempfile.mkstemp(prefix="gossamer-model-")
    try:
        os.posix_fallocate(handle, 0, size_bytes)  # a sparse file would end the process where the disk is full
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size_bytes)
        assert isinstance(storage, torch.UntypedStorage)
        return storage
    except OSError as error:
        raise bad_input(
            wanted=f"{show_gib(size_bytes)} in {tempfile.gettempdir()}, as the model that is built exceeds this rank's "
            "share of the memory",
            got=str(error.strerror),
            do="set TMPDIR to a folder with room for the whole model on every rank",
            key="model",
        ) from None
    finally:
        os.close(handle)
        with suppress(OSError):
            os.unlink(path)


class _Mapping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, beyond_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()
        self._beyond = beyond_bytes
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}  # in memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(out):
            if type(made) is Tensor and _is_large(made) and _key(made) not in given:
                self._place(made)
        return out

    def _place(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key, size = _key(made), storage.nbytes()
        if key in self._live:
            return
        if sum(n for _, n in self._live.values()) + size > self._beyond:
            self._live = {k: (ref, n) for k, (ref, n) in self._live.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        if sum(n for _, n in self._live.values()) + size <= self._beyond:
            self._live[key] = (StorageWeakRef(storage), size)  # type: ignore[no-untyped-call]
            return
        new = file_memory(size)
        self.places.add(new.data_ptr())
        new.copy_(storage)
        made.set_(new, made.storage_offset(), made.shape, made.stride())  # type: ignore[call-overload]


def _is_large(tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() >= _SMALL


def _key(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0
