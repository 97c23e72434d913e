"""The laws of side networks: what they are not combined with, each in one sentence."""

from __future__ import annotations

from gossamer.loss.distillation import Distillation
from gossamer.model import side as sides
from gossamer.recipe.conflicts._beside import ADVERSARIAL, COMPILED, STAGES, refused_beside
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told

_POOLED = ("first", "last", "mean")
_OTHERS = (
    STAGES.because("as a side network reads the outputs of all blocks"),
    COMPILED.because("as a side network taps its blocks"),
    ADVERSARIAL.because("as no gradient reaches the inputs of a model beside a side network"),
)


def side_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a side network beside something that it cannot work with."""
    if recipe.config.model.side == "none":
        return None
    named = f" with model.side {told(recipe.config.model.side)}"
    return refused_beside(recipe, _OTHERS, beside=named, do="use model.adapter", key=sides.KEY)


def tokens_with_loss(recipe: Recipe) -> BadInput | None:
    """Return an error for tokens predicted from a correction that was made of the whole sequence.

    A distillation of text is one by token; of other data only the batches tell (`pooled`).
    """
    loss, config = recipe.loss_of(recipe.config), recipe.config
    is_text_taught = isinstance(loss, Distillation) and config.data.factory is None
    return pooled(config) if loss.by_token or is_text_taught else None


def pooled(config: RunConfig) -> BadInput | None:
    """Return an error for a side network that reads whole sequences, for a loss by token; None without one."""
    written = config.model.side
    if written == "none" or (tokens := sides.build(written, key=sides.KEY).tokens) not in _POOLED:
        return None
    return bad_input(
        wanted=f"tokens: causal with the loss {told(config.train.loss)}, as no token may see a later one",
        got=f"tokens: {tokens}",
        do="write tokens: causal, or set train.loss to that of a classifier",
        key=f"{sides.KEY}.tokens",
    )
