"""The text of tokens as they come: each piece is final, no character is torn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

_TORN = "\ufffd"  # what decoders write for bytes that are no character, or none yet


class TextCoder(Protocol):
    """The part of a tokenizer that text generation needs: `encode` and `decode`."""

    def encode(self, text: str, /) -> Any:
        """Return the token ids of `text`: a sequence of integers."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of token ids."""
        ...


class TextStream:
    """The text of tokens that are appended to `given`: together the pieces are what decoding all at once gives.

    A piece is held back while it ends with bytes that further tokens may complete. Only the last tokens are decoded
    each time; those before them are their context, as decoders drop a space at the start of a text. For bytes that are
    no UTF-8 at all, a decoder that reads a run of them as one (SentencePiece's) may write otherwise than all at once.
    """

    def __init__(self, tokenizer: TextCoder, given: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(given)[-8:]
        self._before = tokenizer.decode(self._ids)  # the text of the ids that are written already
        self._written = len(self._ids)

    def push(self, token: int) -> str:
        """Append a token; return the text that is final now, perhaps none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_TORN) or len(text) <= len(self._before):
            return ""
        piece = text[len(self._before) :]
        self._ids = self._ids[self._written :]  # the tokens of this piece are the context of the next
        self._before, self._written = self._tokenizer.decode(self._ids), len(self._ids)
        return piece

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        return self._tokenizer.decode(self._ids)[len(self._before) :]


def pieces(tokenizer: TextCoder, given: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens`, which come after `given`, in final pieces."""
    stream = TextStream(tokenizer, given)
    for token in tokens:
        if piece := stream.push(token):
            yield piece
    if rest := stream.rest():
        yield rest


def until(text: Iterable[str], stop: str) -> Iterator[str]:
    """Yield `text` up to `stop`, which is left out; what may be its beginning is held back. An empty `stop`: all."""
    held = ""
    for piece in text:
        held += piece
        if stop and (at := held.find(stop)) >= 0:
            if at:
                yield held[:at]
            return
        kept = next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        if len(held) > kept:
            yield held[: len(held) - kept]
            held = held[len(held) - kept :]
    if held:
        yield held
