"""The text of tokens while they come: only what no later token can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no UTF-8, or not yet
_AT_MOST = 3  # bytes of a character that still lacks one: so many marks a decoder may write for it

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """An incremental decoder: the texts that `push` and `end` return are together the text of all tokens.

    A character of several tokens comes with its last one. Tokens are decoded together with those before them, from the
    last place on where text was final: a space may depend on its neighbor. `decode` takes token ids, `given` are those
    before the first, whose text is not returned.
    """

    def __init__(self, decode: Decode, given: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(given)  # from the last final place on; the first are context
        self._final = len(self._ids)  # so many of them have all their text out
        self._out = decode(self._ids) if self._ids else ""  # the text of these that was returned

    def push(self, token: int) -> str:
        """Return the text that is final with `token`; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        open_marks = len(text) - len(text.rstrip(_INCOMPLETE))
        new = self._new(text[: len(text) - min(open_marks, _AT_MOST)])
        if new and not open_marks:
            self._advance()
        return new

    def _advance(self) -> None:
        """Make what was returned last the context of what follows."""
        last = self._ids[self._final :]
        if text := self._decode(last):  # a token that decodes to nothing is no context
            self._ids, self._out = last, text
        self._final = len(self._ids)

    def end(self) -> str:
        """Return the rest, with U+FFFD for a character that stayed incomplete."""
        return self._new(self._decode(self._ids)) if self._ids else ""

    def _new(self, text: str) -> str:
        if not text.startswith(self._out):
            return ""
        new, self._out = text[len(self._out) :], text
        return new
