"""Whether a model can take what the data gives, found before anything is built."""

from __future__ import annotations

from gossamer.spec.errors import BadInput


def check_vocabulary(model: int | None, given: int, *, tokenizer: str = "", has_weights: bool = False) -> None:
    """Raise BadInput where a model of `model` token ids cannot take the `given` ids of a tokenizer (as written).

    None: the model's vocabulary is not known, nothing is checked. A model may have ids to spare: vocabularies are
    padded to round numbers. One with trained weights (`has_weights`) and twice the ids was trained with another
    tokenizer.
    """
    if model is None or (given <= model and not (has_weights and model > 2 * given)):
        return
    named = f"the tokenizer {tokenizer}" if tokenizer else "the tokenizer"
    if given <= model:
        do = "it was trained with another tokenizer; give its own by data.tokenizer: hf:DIR"
    else:
        do = f"set vocab_size in model.config to at least {given}, or give the model's own tokenizer by hf:DIR"
    raise BadInput(f"the model has {model} token ids, {named} gives {given}: {do}", key="data.tokenizer")


def check_sequence(positions: int | None, sequence: int) -> None:
    """Raise BadInput where sequences are longer than the model takes (None: no limit is known)."""
    if positions is not None and sequence > positions:
        raise BadInput(
            f"sequences have {sequence} tokens, the model takes {positions}: "
            "shorten data.sequence, or raise max_position_embeddings in model.config",
            key="data.sequence",
        )
