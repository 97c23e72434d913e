"""Text generation with any model that returns logits: one window, one forward per token, no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.model.forward_adapter import ForwardAdapter, caller_of
from gossamer.model.side_effects import gradless
from gossamer.spec.errors import bad_input


class TextCoder(Protocol):
    """The part of a tokenizer that text generation needs: `encode` and `decode`."""

    def encode(self, text: str, /) -> Any:
        """Return the token ids of `text`: a sequence of integers."""
        ...

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text of token ids."""
        ...


def generate(
    module: nn.Module,
    tokenizer: TextCoder,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    window: int = 256,
    stop: int | None = None,
) -> str:
    """Generate up to `tokens` tokens after `prompt`; return them as text, without the prompt.

    Every token is drawn from softmax(logits / temperature) over the `top_k` likeliest (0: all); temperature 0 takes the
    likeliest. The model sees the last `window` tokens. Ends early after the token `stop`, which is left out. Equal
    arguments give equal text. An empty prompt begins after `stop`, else after token 0. Raises BadInput.
    """
    _check(tokens=tokens, temperature=temperature, top_k=top_k, window=window)
    check_prompt(prompt, key="prompt")
    generator = torch.Generator().manual_seed(seed)
    caller, was_training = caller_of(module), module.training

    def choose(ids: Sequence[int]) -> int:
        return sample_token(_next_logits(module, caller, ids), generator, temperature=temperature, top_k=top_k)

    module.eval()
    try:
        return continue_text(tokenizer, prompt, choose, tokens=tokens, window=window, stop=stop)
    finally:
        module.train(was_training)


def continue_text(
    tokenizer: TextCoder,
    prompt: str,
    choose: Callable[[Sequence[int]], int],
    *,
    tokens: int,
    window: int,
    stop: int | None = None,
) -> str:
    """Return the text that `choose` appends to the prompt, token by token, without the prompt.

    `choose` gets the last `window` token ids and returns the next.
    """
    given = [int(i) for i in tokenizer.encode(prompt)]
    ids = list(given) or [stop if stop is not None else 0]
    for _ in range(tokens):
        chosen = choose(ids[-window:])
        if chosen == stop:
            break
        ids.append(chosen)
    before = tokenizer.decode(given)
    return tokenizer.decode(ids if given else ids[1:])[len(before) :]  # decoded alone, a first space may get lost


def _next_logits(module: nn.Module, caller: ForwardAdapter, ids: Sequence[int]) -> Tensor:
    """Return the logits of the token after `ids`: (vocabulary,) float32 on the CPU."""
    first = next(module.parameters(), None)
    batch = {"input_ids": torch.tensor([ids], device=first.device if first is not None else None)}
    return gradless(lambda: logits_of(caller(module, batch))[0, -1].float().cpu())


def logits_of(output: Any) -> Tensor:
    """Return the logits (batch, sequence, vocabulary) in the output of a forward without labels.

    Raises BadInput if there are none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits")
    if logits is None and isinstance(output, tuple | list):
        logits = next((o for o in output if isinstance(o, Tensor) and o.ndim == 3), None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise bad_input(
            wanted="logits (batch, sequence, vocabulary) from a forward without labels",
            got=f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(output).__name__} without logits",
            do="let forward return its logits where no labels are given",
            key="model",
        )
    return logits


def sample_token(logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int) -> int:
    """Draw one token from `logits` (vocabulary,), as `generate` describes."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def check_prompt(prompt: str, *, key: str) -> None:
    """Raise BadInput for text that no tokenizer can take."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        got = f"{prompt!a}, in which bytes are not UTF-8"
        raise bad_input(wanted="UTF-8 text", got=got, do="write it again in UTF-8", key=key) from None


def _check(*, tokens: int, temperature: float, top_k: int, window: int) -> None:
    for name, value, least in (
        ("tokens", tokens, 1),
        ("temperature", temperature, 0),
        ("top_k", top_k, 0),
        ("window", window, 1),
    ):
        if not value >= least:
            raise bad_input(
                wanted=f"{name} of at least {least}", got=str(value), do=f"set it to {least} or more", key=name
            )
