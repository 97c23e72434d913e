"""Tokens: which of them are read together, and which one stands for the sequence.

The papers aggregate the tokens of an encoder's sequence towards one feature (of the token CLS or EOS): forms first,
last, mean. In a causal language model every token is the last one (EOS) of the tokens up to it, so form causal does for
each token what the papers do for the sequence that ends there; no token sees a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from gossamer.spec.errors import bad_input

AUTO: Final = "auto"
CAUSAL: Final = "causal"
TOKENS: Final = (AUTO, CAUSAL, "first", "last", "mean")


def check_tokens(tokens: str, *, key: str) -> None:
    """Raise BadInput for an unknown form."""
    if tokens not in TOKENS:
        raise bad_input(wanted=f"tokens: one of {', '.join(TOKENS)}", got=tokens, do="write one of these", key=key)


def tokens_of(module: nn.Module, tokens: str, *, key: str) -> str:
    """Return the form for `module`: `tokens`, or what auto stands for. Raises BadInput where auto cannot know."""
    if tokens != AUTO:
        return tokens
    kind = type(module)
    is_known = any(base.__module__.startswith("transformers.") for base in kind.__mro__)
    if is_known and not kind.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise bad_input(
            wanted="which token the head reads, as this is no causal language model",
            got=f"{kind.__name__} with tokens: auto",
            do="write tokens: first (BERT's CLS), last (the last token of the sequence) or mean",
            key=f"{key}.tokens",
        )
    return AUTO  # of another module the first forward tells: causal for (batch, tokens, width), else mean


@dataclass(frozen=True, slots=True)
class TokenView:
    """How the tokens of a micro-batch are read: made at the first tap of a forward, used at all of them.

    `allowed`: (rows, queries, tokens) bool, the tokens that each query reads; None: all. `place`: (rows,) the token
    that is the output feature; None where every token is one (causal), or the mean is. `mask`: (rows, tokens) bool, the
    tokens that are no padding; None: all.
    """

    form: str
    allowed: Tensor | None
    place: Tensor | None
    mask: Tensor | None

    @staticmethod
    def of(
        form: str, shape: torch.Size, device: torch.device, mask: Tensor | None, segments: Tensor | None
    ) -> TokenView:
        """Return the view of hidden states (rows, tokens, width); `segments`: (rows, tokens), the document of each."""
        tokens = shape[1]
        if form == CAUSAL:
            allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None]
            if mask is not None:
                allowed = allowed & mask[:, None, :]
            if segments is not None:
                allowed = allowed & (segments[:, :, None] == segments[:, None, :])
            return TokenView(form, allowed, None, mask)
        if mask is None:
            mask = torch.ones(shape[0], tokens, dtype=torch.bool, device=device)
        place = None
        if form == "first":
            place = mask.int().argmax(1)
        elif form == "last":
            place = tokens - 1 - mask.int().flip(1).argmax(1)
        return TokenView(form, mask[:, None, :], place, mask)

    def feature(self, z: Tensor) -> Tensor:
        """Return the output feature of z (rows, tokens, width): (rows, tokens, width) if causal, (rows, 1, width)."""
        if self.form == CAUSAL:
            return z
        if self.place is not None:
            return z[torch.arange(len(z), device=z.device), self.place][:, None]
        if self.mask is None:
            return z.mean(1, keepdim=True)
        counted = self.mask.to(z.dtype)[..., None]
        return (z * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
