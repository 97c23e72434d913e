"""Text generation with any model that returns logits, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gossamer.model.text_stream import TextCoder, pieces
from gossamer.model.token_logits import token_logits
from gossamer.spec.errors import bad_input

Choose: TypeAlias = Callable[[Sequence[int]], int]  # the ids that a model sees -> the next


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """How the next token is drawn: from softmax(logits / temperature) over the likeliest tokens.

    `temperature` 0 takes the likeliest. `top_k`: of so many (0: all). `top_p`: of these the fewest whose probabilities
    add up to it (nucleus sampling, Holtzman et al., ICLR 2020, arXiv:1904.09751; 1: all). Raises BadInput.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _at_least(0, temperature=self.temperature, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            do = "set it above 0, and to at most 1"
            raise bad_input(wanted="top_p above 0 and at most 1", got=f"{self.top_p:g}", do=do, key="top_p")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw one token from `logits` (vocabulary,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        if 0 < self.top_k < logits.numel():
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, tokens = chances.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # of the tokens before it: the first always stays
            chances = chances.index_fill(0, tokens[beyond], 0.0)
        return int(torch.multinomial(chances, 1, generator=generator))


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

    Every token is drawn as `TokenChoice` says. The model sees the last `window` tokens. Ends early after the token
    `stop`, which is left out. Equal arguments give equal text. An empty prompt begins after `stop`, else after token 0.
    Raises BadInput.
    """
    with _choosing(module, TokenChoice(temperature=temperature, top_k=top_k, top_p=top_p), seed) as choose:
        _at_least(1, tokens=tokens, window=window)
        check_prompt(prompt, key="prompt")
        return continue_text(tokenizer, prompt, choose, tokens=tokens, window=window, stop=stop)


def stream(
    module: nn.Module,
    tokenizer: TextCoder,
    prompt: str,
    *,
    tokens: int = 200,
    choice: TokenChoice | None = None,
    seed: int = 0,
    window: int = 256,
) -> Iterator[str]:
    """Yield the text that `generate` returns, piece by piece as it becomes final. Raises BadInput."""
    with _choosing(module, choice or TokenChoice(), seed) as choose:
        _at_least(1, tokens=tokens, window=window)
        check_prompt(prompt, key="prompt")
        given = [int(i) for i in tokenizer.encode(prompt)]
        yield from pieces(tokenizer, given, continued(given or [0], choose, tokens=tokens, window=window))


@contextmanager
def _choosing(module: nn.Module, choice: TokenChoice, seed: int) -> Iterator[Choose]:
    """Yield the function that draws the token after a sequence; the module is in evaluation mode meanwhile."""
    generator, was_training = torch.Generator().manual_seed(seed), module.training
    module.eval()
    try:
        logits = token_logits(module)
        yield lambda ids: choice.draw(logits.after(ids), generator)
    finally:
        module.train(was_training)


def continued(
    ids: Sequence[int],
    choose: Choose,
    *,
    tokens: int,
    window: int,
    stops: Collection[int] = (),
    stride: int = 1,
) -> Iterator[int]:
    """Yield up to `tokens` tokens after `ids`, until `choose` takes one of `stops`, which is left out.

    `choose` gets the ids that the model sees, and returns the next. When the window is full, it slides by `stride`
    tokens: a larger one lets a cache be of use in between, and leaves as much less to be seen.
    """
    ids = list(ids)
    for _ in range(tokens):
        beyond = max(0, len(ids) - window)
        chosen = choose(ids[-(-beyond // stride) * stride :])
        if chosen in stops:
            return
        yield chosen
        ids.append(chosen)


def continue_text(
    tokenizer: TextCoder,
    prompt: str,
    choose: Choose,
    *,
    tokens: int,
    window: int,
    stop: int | None = None,
) -> str:
    """Return the text that `choose` appends to the prompt, token by token, without the prompt.

    `choose` gets the last `window` token ids and returns the next.
    """
    given = [int(i) for i in tokenizer.encode(prompt)]
    begin = given or [stop if stop is not None else 0]
    stops = () if stop is None else (stop,)
    added = list(continued(begin, choose, tokens=tokens, window=window, stops=stops))
    before = tokenizer.decode(given)
    return tokenizer.decode([*given, *added])[len(before) :]  # decoded alone, a first space may get lost


def sample_token(logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int) -> int:
    """Draw one token from `logits` (vocabulary,), as `generate` describes."""
    return TokenChoice(temperature=temperature, top_k=top_k).draw(logits, generator)


def check_prompt(prompt: str, *, key: str) -> None:
    """Raise BadInput for text that no tokenizer can take."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        got = f"{prompt!a}, in which bytes are not UTF-8"
        raise bad_input(wanted="UTF-8 text", got=got, do="write it again in UTF-8", key=key) from None


def _at_least(least: int, **given: float) -> None:
    for name, value in given.items():
        if not value >= least:
            do = f"set it to {least} or more"
            raise bad_input(wanted=f"{name} of at least {least}", got=str(value), do=do, key=name)
