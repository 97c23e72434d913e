"""Text to numbers and back: one tokenizer per file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.data._written import parse_written
from gossamer.spec.method_config import Written
from gossamer.spec.registry import Registry

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Spans:
    """One text in tokens: `ids` (n,), and `lengths` (n,), the UTF-8 bytes each token stands for.

    The lengths of a text add up to its bytes, whatever the tokenizer does to it on the way; a text without any
    token leaves `rest` bytes, which the separator that follows takes over.
    """

    ids: Ids
    lengths: Ids
    rest: int = 0


class Tokenizer(ABC):
    """A tokenizer ready for use. Token ids are below `vocabulary`; `separator` ends every document."""

    vocabulary: int
    separator: int
    fingerprint: str  # equal for tokenizers that give equal ids
    length_type: str  # numpy type that holds the bytes of any one token

    @abstractmethod
    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Tokens of several texts, without separators."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, separators left out; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, directory: Path) -> tuple[Path, ...]:
        """Write the files by which transformers' AutoTokenizer loads this tokenizer; returns them."""

    def encode(self, text: str) -> Ids:
        """Token ids (n,) of one text, without separator."""
        return self.spans([text])[0].ids


class Recipe(ABC):
    """How a tokenizer is come by, as the configuration writes it: its fields are its whole configuration."""

    @abstractmethod
    def make(self, texts: Callable[[], Iterable[str]], *, identity: str, cache: Path) -> Tokenizer:
        """The tokenizer. `texts` gives the training text, which `identity` (a hash) stands for in `cache`."""


REGISTRY = Registry(__name__, Recipe)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def parse_tokenizer(written: Written, key: str = "data.tokenizer") -> Recipe:
    """`byte`, `bpe:N` or `hf:DIR`; raises BadInput."""
    return parse_written(REGISTRY, written, key=key)
