"""The laws of side networks: what they are not combined with, each in one sentence."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.loss._distillation import Distillation
from gossamer.model import side as sides
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import told

_POOLED = ("first", "last", "mean")
_OTHERS: tuple[tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]], ...] = (
    (
        "a model in one stage, as a side network reads the outputs of all blocks",
        lambda r: r.in_stages,
        lambda r: f"{r.stages} stages",
    ),
    (
        "a model that is not compiled, as a side network taps its blocks",
        lambda r: r.config.model.compile,
        lambda r: "model.compile true",
    ),
    (
        "no adversarial training, as no gradient reaches the inputs of a model beside a side network",
        lambda r: r.config.train.adversarial.epsilon > 0,
        lambda r: f"train.adversarial.epsilon {r.config.train.adversarial.epsilon}",
    ),
)


def side_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a side network beside something that it cannot work with."""
    if recipe.config.model.side == "none":
        return None
    for wanted, is_other, got in _OTHERS:
        if is_other(recipe):
            return bad_input(
                wanted=wanted,
                got=f"{got(recipe)} with model.side {told(recipe.config.model.side)}",
                do="leave that out, or use model.adapter",
                key=sides.KEY,
            )
    return None


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
