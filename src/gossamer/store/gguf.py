"""The header of a GGUF file, read without loading the model: for messages, checks and forecasts.

transformers loads the weights (it knows some twenty architectures and each one's layout). This module adds the checks
that it lacks: a file that is cut short, big-endian or no GGUF at all is rejected within a second or two, before a model
is built.
"""

from __future__ import annotations

import importlib
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.spec.errors import bad_input
from gossamer.spec.extras import install
from gossamer.spec.units import show_bytes

_VERSIONS = (2, 3)
_LONG = 4096  # entries of a list: no layers, but the words of a tokenizer


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """The header of a GGUF file. Counts in elements and tokens; 0 or "" where the file does not say."""

    path: Path
    architecture: str
    name: str
    licence: str
    parameters: int
    context: int
    vocabulary: int
    layers: int
    width: int
    tokenizer: str  # its kind, and how it cuts text before it merges: "gpt2/smollm"
    tensors: Mapping[str, int]  # storage type -> how many tensors are held in it
    file_bytes: int

    def __str__(self) -> str:
        held = ", ".join(f"{count} {kind}" for kind, count in self.tensors.items())
        return (
            f"{self.path.name}: {self.name or self.architecture}, {self.architecture}, "
            f"{self.parameters / 1e6:.1f} M parameters in {self.layers} layers of width {self.width}, "
            f"context {self.context}, vocabulary {self.vocabulary}, {show_bytes(self.file_bytes)} ({held})"
        )


def read_summary(path: Path | str) -> GgufSummary:
    """Read the header and check that every tensor lies within the file; raises BadInput."""
    path = Path(path)
    size = _check_start(path)
    reader = _reader(path, size)
    fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) < 2}
    lengths = {name: len(field.data) for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise bad_input(
            wanted=f"a model in {path}", got="a file without general.architecture", do="give the GGUF file of a model"
        )
    pre = fields.get("tokenizer.ggml.pre")
    return GgufSummary(
        path=path,
        architecture=architecture,
        name=str(fields.get("general.name", "")),
        licence=str(fields.get("general.license", "")),
        parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
        context=int(fields.get(f"{architecture}.context_length", 0)),
        vocabulary=int(fields.get(f"{architecture}.vocab_size", lengths.get("tokenizer.ggml.tokens", 0))),
        layers=int(fields.get(f"{architecture}.block_count", 0)),
        width=int(fields.get(f"{architecture}.embedding_length", 0)),
        tokenizer=str(fields.get("tokenizer.ggml.model", "")) + (f"/{pre}" if pre else ""),
        tensors=dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
        file_bytes=size,
    )


def _check_start(path: Path) -> int:
    """Return the size in bytes; raises BadInput for a file that does not begin like a GGUF file of a known version."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            size = file.seek(0, 2)
    except OSError as error:
        raise bad_input(
            wanted=f"a GGUF file at {path}", got=error.strerror or "", do="give the path of an existing file"
        ) from None
    if start[:4] != b"GGUF":
        raise bad_input(wanted=f"a GGUF file at {path}", got=f"one that begins {start[:4]!r}", do="give another file")
    version = int.from_bytes(start[4:], "little")
    if version not in _VERSIONS:
        raise bad_input(
            wanted=f"GGUF version 2 or 3, little-endian, in {path}",
            got=f"version {version}",
            do="convert the model again",
        )
    return size


def _reader(path: Path, size: int) -> Any:
    try:
        gguf = importlib.import_module("gguf")
    except ImportError:
        raise bad_input(wanted="the package gguf", got="none", do=install("hf")) from None
    try:
        with without_words():
            return gguf.GGUFReader(str(path))
    except Exception as error:  # the package has no errors of its own: a cut file fails wherever it is cut
        raise bad_input(
            wanted=f"a whole GGUF file at {path}",
            got=f"{size} bytes that end early or are damaged ({type(error).__name__}: {error})",
            do="fetch it again",
        ) from None


@contextmanager
def without_words() -> Iterator[None]:
    """Make GGUF readers skip the contents of long lists and keep their length, inside the `with` block.

    The gguf package makes two arrays of every word and merge of a tokenizer: 150 MB and seconds for 50 000 of them.
    """
    reader: Any = importlib.import_module("gguf").GGUFReader
    real = reader._get_field_parts

    def parts(self: Any, offset: int, kind: int) -> Any:
        return (_long_list(self, offset) if kind == _ARRAY else None) or real(self, offset, kind)

    reader._get_field_parts = parts
    try:
        yield
    finally:
        reader._get_field_parts = real


_ARRAY, _STRING, _HEAD_BYTES = 9, 8, 12  # types as numbers in the file; a list begins with its type and length


def _long_list(reader: Any, offset: int) -> tuple[int, list[Any], list[int], list[Any]] | None:
    """Bytes, parts, which part each entry is (all the same one), and types; None for a list that is short."""
    inner, count = int(reader._get(offset, np.uint32)[0]), int(reader._get(offset + 4, np.uint64)[0])
    if count <= _LONG or inner == _ARRAY:
        return None
    value_type: Any = importlib.import_module("gguf").GGUFValueType
    at = offset + _HEAD_BYTES
    if inner == _STRING:
        entry = reader._get(at, np.uint8, 0)
        end = _after_strings(reader.data, at, count)
    else:
        entry = reader._get(at, reader.gguf_scalar_to_np[value_type(inner)])
        end = at + count * int(entry.nbytes)
    return end - offset, [entry], [0] * count, [value_type(_ARRAY), value_type(inner)]


def _after_strings(data: Any, at: int, count: int) -> int:
    raw = memoryview(data)
    for _ in range(count):
        at += 8 + struct.unpack_from("<Q", raw, at)[0]
    return at
