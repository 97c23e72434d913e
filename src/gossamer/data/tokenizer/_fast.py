"""Tokenizers of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.data.chat_template import ChatTemplate
from gossamer.data.tokenizer import Ids, Spans, Tokenizer
from gossamer.data.tokenizer._files import write_files
from gossamer.spec.errors import bad_input
from gossamer.spec.extras import install


@dataclass(frozen=True)
class Fast(Tokenizer):
    """A `tokenizers.Tokenizer` from its JSON. Text that spells a special token is text, not that token."""

    vocabulary: int
    separator: int
    fingerprint: str
    inner: Any = field(repr=False, compare=False)
    length_type: str = "uint32"
    template: ChatTemplate | None = None
    special: tuple[str, ...] = ()

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        found = self.inner.encode_batch(list(texts), add_special_tokens=False)
        return [_spans(text, encoding) for text, encoding in zip(texts, found, strict=True)]

    def rendered_spans(self, texts: Sequence[str]) -> list[Spans]:
        found = self._reads_special.encode_batch(list(texts), add_special_tokens=False)
        return [
            replace(_spans(text, encoding), letters=np.asarray(encoding.offsets, np.int64).reshape(-1, 2))
            for text, encoding in zip(texts, found, strict=True)
        ]

    @cached_property
    def _reads_special(self) -> Any:
        """A copy that reads special tokens: the switch of one tokenizer would act on all its users."""
        return library("data.tokenizer").Tokenizer.from_str(self.inner.to_str())

    def spell(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode([int(one) for one in ids], skip_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(one) for one in ids if one != self.separator]
        return str(self.inner.decode(kept, skip_special_tokens=False))

    def save(self, directory: Path) -> tuple[Path, ...]:
        return write_files(directory, self.inner.to_str(), separator=self.inner.id_to_token(self.separator))


def load(text: str, *, separator: str, key: str, template: ChatTemplate | None = None) -> Fast:
    """Load the tokenizer in a tokenizer.json whose token `separator` ends documents; raises BadInput.

    `template`: the chat template that belongs to it.
    """
    kit = library(key)
    try:
        inner = kit.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise bad_input(
            wanted="a tokenizer.json that the package tokenizers can read",
            got=f"the error {str(error)!r}",
            do="replace the file by an intact one",
            key=key,
        ) from None
    inner.encode_special_tokens = True  # a document that spells <|endoftext|> must not end there
    inner.no_truncation()
    inner.no_padding()
    ids = inner.get_vocab(with_added_tokens=True)
    if separator not in ids:
        raise bad_input(
            wanted=f"the end-of-document token {separator!r} in the tokenizer's vocabulary",
            got=f"{len(ids)} other tokens",
            do="name a token of that vocabulary as eos_token in tokenizer_config.json",
            key=key,
        )
    content = hashlib.sha256(f"{text}\0{separator}".encode()).hexdigest()
    marks = [token.content for token in inner.get_added_tokens_decoder().values() if token.special]
    return Fast(
        vocabulary=max(ids.values()) + 1,
        separator=ids[separator],
        fingerprint=content,
        inner=inner,
        template=template,
        special=(separator, *(mark for mark in marks if mark != separator)),
    )


def library(key: str) -> Any:
    """Import the `tokenizers` package, when first needed; raises BadInput where it is not installed."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise bad_input(wanted="the package tokenizers", got="no such package", do=install("hf"), key=key) from None


def _spans(text: str, encoding: Any) -> Spans:
    ids = np.asarray(encoding.ids, np.int64)
    bytes_before = _bytes_before(text)  # (letters + 1,)
    if not ids.size:
        return Spans(ids, np.zeros(0, np.int64), rest=int(bytes_before[-1]))
    ends = np.maximum.accumulate(np.asarray(encoding.offsets, np.int64)[:, 1])  # (n,) in letters
    ends[-1] = len(text)  # the last token takes what was dropped behind it
    return Spans(ids, np.diff(bytes_before[ends], prepend=0))


def _bytes_before(text: str) -> Ids:
    """(letters + 1,): UTF-8 bytes before each letter of `text`, and in all of it."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
