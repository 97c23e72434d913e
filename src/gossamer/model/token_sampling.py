"""The draw of a token from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """How the next token is drawn: from softmax(logits / temperature), cut to the likeliest.

    `temperature` 0 takes the likeliest; `top_k`: among so many likeliest (0: all); `top_p`: among the fewest likeliest
    whose probabilities (at that temperature, within `top_k`) add up to it. Raises BadInput.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_least(temperature=(self.temperature, 0), top_k=(self.top_k, 0))
        if not 0 < self.top_p <= 1:
            raise bad_input(
                wanted="top_p above 0 and at most 1", got=f"{self.top_p:g}", do="set 1 for all tokens", key="top_p"
            )

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw one token from `logits` (vocabulary,), fp32 on the CPU."""
        if self.temperature == 0:
            return int(logits.argmax())
        if 0 < self.top_k < logits.numel():
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = (logits / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, places = probabilities.sort(descending=True, stable=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p  # what is likelier adds up to it already
            probabilities = probabilities.index_fill(0, places[outside], 0.0)
        return int(torch.multinomial(probabilities, 1, generator=generator))


def check_least(**values: tuple[float, float]) -> None:
    """Raise BadInput for a value below its least: name=(value, least)."""
    for name, (value, least) in values.items():
        if not value >= least:
            raise bad_input(
                wanted=f"{name} of at least {least}", got=str(value), do=f"set it to {least} or more", key=name
            )
