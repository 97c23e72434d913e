"""Checks that a model takes the token ids and the sequence length of the data, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import Tensor, nn

from gossamer.spec.errors import BadInput


def check_vocabulary(model: int | None, given: int, *, tokenizer: str = "", has_weights: bool = False) -> None:
    """Raise BadInput if a model of `model` token ids cannot take the `given` ids of a tokenizer (as written).

    With `model` None the model's vocabulary is unknown, and nothing is checked. A model may have more ids: vocabularies
    are padded to round numbers. One with trained weights (`has_weights`) and more than twice the ids was trained with
    another tokenizer.
    """
    if model is None or (given <= model and not (has_weights and model > 2 * given)):
        return
    named = f"the tokenizer {tokenizer}" if tokenizer else "the tokenizer"
    if given <= model:
        do = "the model was trained with another tokenizer; set data.tokenizer: hf:DIR to the model's own tokenizer"
    else:
        do = f"set vocab_size in model.config to at least {given}, or give the model's own tokenizer by hf:DIR"
    raise BadInput(f"the model has {model} token ids, {named} gives {given}: {do}", key="data.tokenizer")


@contextmanager
def checking_token_ids(module: nn.Module, tokens: Tensor, given: int) -> Iterator[None]:
    """Check token ids around a forward over `tokens`: raise BadInput if an embedding is smaller than the tokenizer.

    Its rows are compared with `given`, the number of the tokenizer's ids (0: there is none), even if all of `tokens`
    are among its rows. Only embeddings whose input is `tokens` count. An index error in the forward is handled by
    `explain`.
    """

    def look(one: nn.Embedding, args: tuple[object, ...]) -> None:
        ids = args[0] if args else None
        is_of_tokens = isinstance(ids, Tensor) and ids.shape == tokens.shape and ids.data_ptr() == tokens.data_ptr()
        if is_of_tokens and one.num_embeddings < given:
            raise _too_small(one.num_embeddings, f"the tokenizer gives {given}", given)

    hooks = [one.register_forward_pre_hook(look) for one in module.modules() if isinstance(one, nn.Embedding)]
    try:
        yield
    except IndexError as error:
        explain(error, tokens)
        raise
    finally:
        for hook in hooks:
            hook.remove()


def explain(error: IndexError, tokens: Tensor | None) -> None:
    """Raise BadInput instead of `error` if an embedding has no row for one of `tokens`, or for its position."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "embedding"]
    held = frames[-1].f_locals if frames else {}
    ids, weight = held.get("input"), held.get("weight")
    if not isinstance(ids, Tensor) or not isinstance(weight, Tensor) or tokens is None:
        return
    if ids.shape == tokens.shape and torch.equal(ids, tokens.to(ids.device)):
        largest = int(ids.max())
        raise _too_small(len(weight), f"the data has token {largest}", largest + 1) from error
    length = tokens.shape[-1]
    if ids.shape[-1:] == (length,) and torch.equal(ids.flatten()[:length].cpu(), torch.arange(length)):
        check_sequence(len(weight), length)


def _too_small(rows: int, given: str, wanted: int) -> BadInput:
    return BadInput(
        f"the model has {rows} token ids, {given}: build it with a vocabulary of at least {wanted}, or give the "
        "model's own tokenizer by hf:DIR",
        key="data.tokenizer",
    )


def check_sequence(positions: int | None, sequence: int) -> None:
    """Raise BadInput if sequences are longer than the model takes (`positions` None: no limit is known)."""
    if positions is not None and sequence > positions:
        raise BadInput(
            f"sequences have {sequence} tokens, the model takes {positions}: "
            "shorten data.sequence, or raise max_position_embeddings in model.config",
            key="data.sequence",
        )
