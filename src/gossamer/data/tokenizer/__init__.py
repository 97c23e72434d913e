"""Tokenizers: convert text to token ids and back; one tokenizer per file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.data._written import parse_written
from gossamer.data.chat_template import ChatTemplate
from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Spans:
    """The tokens of one text: `ids` (n,), and `lengths` (n,), the UTF-8 bytes each token stands for.

    The lengths of a text add up to its bytes, whatever the tokenizer normalizes. A text without any token leaves `rest`
    bytes, which count for the separator that follows. `letters` (n, 2), of rendered texts alone: the first letter of
    each token and the one behind its last; tokens that share a letter have it in common.
    """

    ids: Ids
    lengths: Ids
    rest: int = 0
    letters: Ids | None = None


class Tokenizer(ABC):
    """A tokenizer ready for use. Token ids are below `vocabulary`; `separator` ends every document."""

    vocabulary: int
    separator: int
    fingerprint: str  # equal for tokenizers that give equal ids
    length_type: str  # numpy type that holds the bytes of any one token
    template: ChatTemplate | None = None  # of the chat model that it belongs to
    special: tuple[str, ...] = ()  # the texts of the special tokens, the separator's first

    @abstractmethod
    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Return the tokens of several texts, without separators."""

    @abstractmethod
    def rendered_spans(self, texts: Sequence[str]) -> list[Spans]:
        """Return the tokens of texts that a chat template made: what spells a special token is that token."""

    @abstractmethod
    def spell(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` with every special token spelled out, the separator too."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, separators left out; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write the files from which transformers' AutoTokenizer loads this tokenizer; return their paths."""

    def encode(self, text: str) -> Ids:
        """Return the token ids (n,) of one text, without separator."""
        return self.spans([text])[0].ids


class TokenizerBuilder(ABC):
    """The configuration from which a tokenizer is made: loaded, or trained on the corpus."""

    @abstractmethod
    def make(self, texts: Callable[[], Iterable[str]], *, identity: str, cache: Path) -> Tokenizer:
        """Make the tokenizer. `texts` returns the training text, which `identity` (a hash) represents in `cache`."""


REGISTRY = Registry(__name__, TokenizerBuilder)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def parse_tokenizer(written: Written, key: str = "data.tokenizer") -> TokenizerBuilder:
    """Parse a tokenizer's configuration: `byte`, `bpe:N` or `hf:DIR`; raises BadInput."""
    return parse_written(REGISTRY, written, key=key)
