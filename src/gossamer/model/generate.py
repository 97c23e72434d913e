"""Text generation with any model that returns logits: one window, from a key-value cache where the model has one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from gossamer.model.next_logits import next_logits_of
from gossamer.model.text_stream import TextStream
from gossamer.model.token_sampling import TokenSampling, check_least
from gossamer.spec.errors import bad_input


class TextCoder(Protocol):
    """The part of a tokenizer that text generation needs: `encode` and `decode`."""

    def encode(self, text: str, /) -> Any:
        """Return the token ids of `text`: a sequence of integers."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of token ids."""
        ...


Choose = Callable[[Sequence[int]], int]  # the next token, from the last tokens


def generate(
    module: nn.Module,
    tokenizer: TextCoder,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    window: int = 256,
    stop: int | None = None,
) -> str:
    """Generate up to `tokens` tokens after `prompt`; return them as text, without the prompt.

    Every token is drawn as `TokenSampling` says. The model sees the last `window` tokens. While they fit, a
    transformers model computes each token once and keeps its keys and values; when the window is full it slides by one
    token, and all of it is computed at every token, as for other modules. Ends early after the token `stop`, which is
    left out. Equal arguments give equal text. An empty prompt begins after `stop`, else after token 0. Raises BadInput.
    """
    sampling = TokenSampling(temperature, top_k, top_p)
    check_least(tokens=(tokens, 1), window=(window, 1))
    check_prompt(prompt, key="prompt")
    with choosing(module, sampling, seed) as choose:
        return continue_text(tokenizer, prompt, choose, tokens=tokens, window=window, stop=stop)


def generate_pieces(
    module: nn.Module,
    tokenizer: TextCoder,
    prompt: str,
    *,
    sampling: TokenSampling,
    tokens: int = 200,
    seed: int = 0,
    window: int = 256,
    stop: int | None = None,
) -> Iterator[str]:
    """Yield the text that `generate` returns, in pieces, each as soon as it is final. Raises BadInput."""
    check_least(tokens=(tokens, 1), window=(window, 1))
    check_prompt(prompt, key="prompt")
    given, first = _given(tokenizer, prompt, stop)
    stream = TextStream(tokenizer.decode, given)
    with choosing(module, sampling, seed) as choose:
        for token in next_tokens(given or [first], choose, tokens=tokens, window=window, stop=stop):
            yield stream.push(token)
    yield stream.end()


@contextmanager
def choosing(module: nn.Module, sampling: TokenSampling, seed: int) -> Iterator[Choose]:
    """Set `module` to evaluation mode in this context; yield the function that draws the token after given ids."""
    generator, was_training = torch.Generator().manual_seed(seed), module.training
    module.eval()
    try:
        logits = next_logits_of(module)
        yield lambda ids: sampling.draw(logits.after(ids), generator)
    finally:
        module.train(was_training)


def continue_text(
    tokenizer: TextCoder, prompt: str, choose: Choose, *, tokens: int, window: int, stop: int | None = None
) -> str:
    """Return the text that `choose` appends to the prompt, token by token, without the prompt.

    `choose` gets the last `window` token ids and returns the next.
    """
    given, first = _given(tokenizer, prompt, stop)
    found = list(next_tokens(given or [first], choose, tokens=tokens, window=window, stop=stop))
    before = tokenizer.decode(given)
    return tokenizer.decode([*given, *found])[len(before) :]  # decoded alone, a first space may get lost


def next_tokens(
    ids: Sequence[int], choose: Choose, *, tokens: int, window: int, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `tokens` tokens that `choose` appends to `ids`; end before `stop`."""
    known = list(ids)
    for _ in range(tokens):
        chosen = choose(known[-window:])
        if chosen == stop:
            return
        known.append(chosen)
        yield chosen


def _given(tokenizer: TextCoder, prompt: str, stop: int | None) -> tuple[list[int], int]:
    """Return the tokens of the prompt, and the one that an empty prompt begins after."""
    return [int(i) for i in tokenizer.encode(prompt)], stop if stop is not None else 0


def check_prompt(prompt: str, *, key: str) -> None:
    """Raise BadInput for text that no tokenizer can take."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        got = f"{prompt!a}, in which bytes are not UTF-8"
        raise bad_input(wanted="UTF-8 text", got=got, do="write it again in UTF-8", key=key) from None
