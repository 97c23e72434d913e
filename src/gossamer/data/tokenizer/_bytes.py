"""The byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Spans, Tokenizer
from gossamer.data.tokenizer._files import SEPARATOR, write_files

_SEPARATOR_ID = 256


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """The tokenizer with one token per byte of UTF-8."""

    vocabulary: int = 257
    separator: int = _SEPARATOR_ID
    fingerprint: str = "byte-257-v1"
    length_type: str = "uint8"
    template: ChatTemplate | None = None
    special: tuple[str, ...] = (SEPARATOR,)

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        raw = [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
        return [Spans(data, np.ones(data.size, np.uint8)) for data in raw]

    def rendered_spans(self, texts: Sequence[str]) -> list[Spans]:
        return [_with_separators(text) for text in texts]

    def spell(self, ids: Iterable[int]) -> str:
        given = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        pieces = np.split(given, np.flatnonzero(given == _SEPARATOR_ID))
        return SEPARATOR.join(self.decode(piece) for piece in pieces)

    def decode(self, ids: Iterable[int]) -> str:
        given = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        return given[given < _SEPARATOR_ID].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write the tokenizer as a byte-level BPE without merges, whose ids are the bytes."""
        return write_files(directory, json.dumps(_tokenizer_json(), ensure_ascii=False), separator=SEPARATOR)


def _with_separators(text: str) -> Spans:
    ids: list[int] = []
    lengths: list[int] = []
    letters: list[tuple[int, int]] = []
    for number, piece in enumerate(text.split(SEPARATOR)):
        at = letters[-1][1] if letters else 0
        if number:
            ids.append(_SEPARATOR_ID)
            lengths.append(len(SEPARATOR))
            letters.append((at, at + len(SEPARATOR)))
            at += len(SEPARATOR)
        for place, letter in enumerate(piece, start=at):
            data = letter.encode("utf-8")
            ids += data
            lengths += [1] * len(data)
            letters += [(place, place + 1)] * len(data)
    return Spans(np.array(ids, np.int64), np.array(lengths, np.int64), letters=np.array(letters).reshape(-1, 2))


def _tokenizer_json() -> dict[str, Any]:
    letters = _byte_letters()
    separator = {"id": _SEPARATOR_ID, "content": SEPARATOR, "special": True, "normalized": False}
    separator |= {"single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: byte for byte, letter in enumerate(letters)} | {SEPARATOR: _SEPARATOR_ID}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [separator],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_letters() -> list[str]:
    """Return GPT-2's printable stand-ins for the 256 bytes: printable bytes as they are, the others from 256 up."""
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]
