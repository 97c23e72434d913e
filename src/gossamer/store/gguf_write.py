"""Write a GGUF file tensor by tensor: beside its target first, so that a failed export leaves nothing.

Format: github.com/ggml-org/ggml, docs/gguf.md, version 3, little-endian. The package gguf writes header and padding.
"""

from __future__ import annotations

import errno
import importlib
import logging
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gossamer.spec.errors import RunFailed, bad_input
from gossamer.spec.extras import install
from gossamer.spec.units import show_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_TEXT, _LIST = 8, 9  # GGUFValueType.STRING, ARRAY


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file to be written: its name, shape (rows first), and type, as `F16` or `Q8_0`."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file, without padding."""
        package = gguf_package()
        elements, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[self.kind]]
        count = 1
        for extent in self.shape:
            count *= extent
        return int(count // elements * size)


def gguf_package() -> Any:
    """Import the package gguf when first needed; raise BadInput where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise bad_input(wanted="the package gguf", got="none", do=install("hf")) from None


def check_new(target: Path) -> None:
    """Raise BadInput if there is something at `target`, or no folder to hold it."""
    if target.exists() or target.is_symlink():
        raise bad_input(
            wanted="a new file to export into",
            got=f"{target}, which exists",
            do="name another file, or remove this one first: nothing is ever overwritten",
        )


def write_gguf(
    target: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Sequence[GgufTensor],
    contents: Iterator[NDArray[Any]],
) -> int:
    """Write the new file `target`; return its bytes.

    fields: metadata by key: texts, truths, integers (uint32), floats (float32), lists of texts or of integers (int32).
    contents: the values of `tensors`, in their order, in the type and layout of the file; taken one by one.
    Raises BadInput where `target` exists or cannot be written, RunFailed where the disk is full.
    """
    check_new(target)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _writer(partial, architecture, fields, tensors) as writer:
            for tensor, values in zip(tensors, contents, strict=True):
                if values.nbytes != tensor.nbytes:  # the file would be damaged
                    raise AssertionError(f"{tensor.name}: {values.nbytes} bytes, {tensor.nbytes} announced")
                writer.write_tensor_data(values)
        check_new(target)
        partial.rename(target)
    except OSError as error:
        if error.errno not in _FULL:
            raise bad_input(
                wanted=f"a file that can be written at {target}",
                got=error.strerror or str(error),
                do="name another file",
            ) from None
        free = show_bytes(shutil.disk_usage(target.parent).free) if target.parent.is_dir() else "nothing"
        raise RunFailed(
            f"{target} was not written: {error.strerror} ({free} free): free disk space, or name another file"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return target.stat().st_size


@contextmanager
def _writer(
    partial: Path, architecture: str, fields: Mapping[str, Any], tensors: Sequence[GgufTensor]
) -> Iterator[Any]:
    """Yield a writer of the package whose header is written, up to the place of the first tensor."""
    package = gguf_package()
    logging.getLogger("gguf.gguf_writer").setLevel(logging.ERROR)  # it tells every user its byte order

    base: Any = package.GGUFWriter

    class Writer(base):  # type: ignore[misc]
        """The package's writer, which has no form for an empty list: the merges of a vocabulary of bytes."""

        def _pack_val(self, val: Any, vtype: Any, *rest: Any, **named: Any) -> bytes:
            if vtype == _LIST and not val:
                return struct.pack("<IIQ", _LIST, _TEXT, 0)
            return bytes(super()._pack_val(val, vtype, *rest, **named))

    writer = Writer(partial, architecture)
    for key, value in fields.items():
        _add(writer, package, key, value)
    for tensor in tensors:
        kind = package.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, kind)
    try:
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer
    finally:
        writer.close()


def _add(writer: Any, package: Any, key: str, value: Any) -> None:
    kinds = package.GGUFValueType
    if isinstance(value, list):
        writer.add_key_value(key, value, kinds.ARRAY)  # of int32 or texts, as the package sees from the first
    else:
        kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
        writer.add_key_value(key, value, kind)
