"""A split as one flat stream of tokens on disk, read through memory maps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.data.answer_spans import Rendered
from gossamer.data.learnt_tokens import learnt_tokens
from gossamer.data.tokenizer import Ids, Spans, Tokenizer

_GROUP_LETTERS = 1 << 22  # documents are tokenized in groups of about this size, in parallel within one

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The token stream of a split: documents one after the other, each ended by the separator.

    `tokens` (n,): ids. `lengths` (n,): UTF-8 bytes each token stands for, 0 for separators (but see `Spans.rest`).
    `starts` (documents,): index of each document's first token, so that `starts[d + 1]` follows a separator.

    Of conversations: `learnt` (n,) is 1 for the tokens of answers and of the ends of their turns; `lengths` count the
    answers' own text alone; and no separator follows a conversation, which ends as its template says.
    """

    tokens: Ids
    lengths: Ids
    starts: Int64
    separator: int
    learnt: NDArray[np.uint8] | None = None  # None: all are

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
    rows = (
        {"tokens": np.append(spans.ids, tokenizer.separator), "lengths": np.append(spans.lengths, spans.rest)}
        for spans in _tokenized(texts, tokenizer)
    )
    return _write(rows, types, folder=folder, side=side)


def write_conversations(texts: Iterable[Rendered], tokenizer: Tokenizer, *, folder: Path, side: str) -> dict[str, Any]:
    """Tokenize rendered conversations into four flat files of `folder`; return what `read_stream` needs.

    A token is learnt where it stands for any letter of a learnt span. `shared` counts the answers whose first token
    stands for letters in front of the answer too: at inference the prompt ends between them.
    """
    types = {"tokens": token_type(tokenizer), "lengths": "uint32", "learnt": "uint8", "starts": "int64"}
    shared = 0

    def rows() -> Iterator[dict[str, Ids]]:
        nonlocal shared
        for one in texts:
            (spans,) = tokenizer.rendered_spans([one.text])
            marks = learnt_tokens(one, spans)
            shared += marks.shared
            yield {"tokens": spans.ids, "lengths": marks.lengths, "learnt": marks.learnt}

    return {**_write(rows(), types, folder=folder, side=side), "shared": shared}


def _write(rows: Iterable[dict[str, Ids]], types: dict[str, str], *, folder: Path, side: str) -> dict[str, Any]:
    """Write one document after the other, each given as its tokens and what belongs to them."""
    documents = tokens = bytes_ = 0
    with ExitStack() as open_files:
        files = {part: open_files.enter_context((folder / f"{side}.{part}").open("wb")) for part in types}
        for row in rows:
            for part, values in {**row, "starts": np.array([tokens])}.items():
                files[part].write(values.astype(types[part]).tobytes())
            documents, tokens = documents + 1, tokens + row["tokens"].size
            bytes_ += int(row["lengths"].sum(dtype=np.int64))
    return {"documents": documents, "tokens": tokens, "bytes": bytes_, "types": types}


def read_stream(folder: Path, side: str, known: dict[str, Any], *, separator: int) -> Stream:
    """Return the stream that `write_stream` wrote. Only `starts` is read into memory."""
    tokens = _mapped(folder / f"{side}.tokens", known["types"]["tokens"])
    lengths = _mapped(folder / f"{side}.lengths", known["types"]["lengths"])
    starts = np.fromfile(folder / f"{side}.starts", np.int64)
    learnt = _mapped(folder / f"{side}.learnt", "uint8") if "learnt" in known["types"] else None
    return Stream(tokens, lengths, starts, separator, learnt)


def is_intact(folder: Path, side: str, known: dict[str, Any]) -> bool:
    """Return whether the files have the sizes they were written with."""
    files = {
        folder / f"{side}.{part}": known["documents" if part == "starts" else "tokens"] * np.dtype(kind).itemsize
        for part, kind in known["types"].items()
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
