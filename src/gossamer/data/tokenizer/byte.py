"""Bytes as tokens: 256 of them and a separator. Nothing to train, nothing to load, nothing out of vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gossamer.data.tokenizer import Tokenizer, TokenizerBuilder
from gossamer.data.tokenizer._bytes import Bytes


@dataclass(frozen=True)
class Byte(TokenizerBuilder):
    """The byte tokenizer: ids 0 to 255 are the bytes of UTF-8, 256 ends a document; vocabulary 257, not padded."""

    def make(self, texts: Callable[[], Iterable[str]], *, identity: str, cache: Path) -> Tokenizer:
        return Bytes()
