"""A split as one flat stream of tokens on disk, read through memory maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.data.tokenizer import Ids, Spans, Tokenizer

_GROUP_LETTERS = 1 << 22  # documents are tokenized in groups of about this size, in parallel within one

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The token stream of a split: documents one after the other, each ended by the separator.

    `tokens` (n,): ids. `lengths` (n,): UTF-8 bytes each token stands for, 0 for separators (but see `Spans.rest`).
    `starts` (documents,): index of each document's first token, so that `starts[d + 1]` follows a separator.
    """

    tokens: Ids
    lengths: Ids
    starts: Int64
    separator: int

    @property
    def bytes(self) -> int:
        """The UTF-8 bytes of all text in the stream."""
        return int(self.lengths.sum(dtype=np.int64))

    def ends(self) -> Int64:
        """Return the index (documents,) at which each document ends, its separator included."""
        return np.append(self.starts[1:], self.tokens.size).astype(np.int64)


def token_type(tokenizer: Tokenizer) -> str:
    """Return the name of the smallest numpy type that holds every token id: uint16 or uint32."""
    return "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"


def write_stream(texts: Iterable[str], tokenizer: Tokenizer, *, folder: Path, side: str) -> dict[str, Any]:
    """Tokenize `texts` into three flat files of `folder`; return the counts and types that `read_stream` needs."""
    types = {"tokens": token_type(tokenizer), "lengths": tokenizer.length_type, "starts": "int64"}
    documents = tokens = bytes_ = 0
    with ExitStack() as open_files:
        files = {part: open_files.enter_context((folder / f"{side}.{part}").open("wb")) for part in types}
        for spans in _tokenized(texts, tokenizer):
            row = {
                "tokens": np.append(spans.ids, tokenizer.separator),
                "lengths": np.append(spans.lengths, spans.rest),
                "starts": np.array([tokens]),
            }
            for part, values in row.items():
                files[part].write(values.astype(types[part]).tobytes())
            documents, tokens = documents + 1, tokens + row["tokens"].size
            bytes_ += int(row["lengths"].sum(dtype=np.int64))
    return {"documents": documents, "tokens": tokens, "bytes": bytes_, "types": types}


def read_stream(folder: Path, side: str, known: dict[str, Any], *, separator: int) -> Stream:
    """Return the stream that `write_stream` wrote. Only `starts` is read into memory."""
    tokens = _mapped(folder / f"{side}.tokens", known["types"]["tokens"])
    lengths = _mapped(folder / f"{side}.lengths", known["types"]["lengths"])
    starts = np.fromfile(folder / f"{side}.starts", np.int64)
    return Stream(tokens, lengths, starts, separator)


def is_intact(folder: Path, side: str, known: dict[str, Any]) -> bool:
    """Return whether the three files have the sizes they were written with."""
    counts = {"tokens": known["tokens"], "lengths": known["tokens"], "starts": known["documents"]}
    files = {
        folder / f"{side}.{part}": count * np.dtype(known["types"][part]).itemsize for part, count in counts.items()
    }
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def _mapped(file: Path, kind: str) -> Ids:
    if not file.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, kind)
    return np.memmap(file, kind, mode="r")


def _tokenized(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Spans]:
    group: list[str] = []
    letters = 0
    for text in texts:
        group.append(text)
        letters += len(text)
        if letters >= _GROUP_LETTERS:
            yield from tokenizer.spans(group)
            group, letters = [], 0
    if group:
        yield from tokenizer.spans(group)
