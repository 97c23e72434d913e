"""The laws of the gradient exchange: clipping around it, what it may lose, what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange
from gossamer.recipe.nearby_settings import RegisteredSettings
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.recipe.recipe import Recipe
from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, told

_PLAN = PlanSection()


def clipped(
    exchanges: Sequence[Exchange], clip: float, *, key: str = "plan.exchange", clip_key: str = "train.max_grad_norm"
) -> BadInput | None:
    """Return an error for gradient clipping around an exchange whose result does not have the gradient's norm."""
    inside = [one for outer in exchanges for one in exchange_methods.nested(outer)]
    wrong = next((one for one in inside if not one.has_true_norm), None)
    if not clip or wrong is None:
        return None
    return bad_input(
        wanted=f"no gradient clipping with the exchange `{method_name(wrong)}`, whose mean does not have the "
        "gradient's norm",
        got=f"{clip_key} {clip:g}",
        do=f"set {clip_key} to 0",
        key=key,
    )


def method_name(method: Exchange) -> str:
    """Return the method's name, that of its file."""
    return type(method).__module__.rpartition(".")[2]


def clipping_with_exchange(recipe: Recipe) -> BadInput | None:
    """Return an error for gradient clipping around an exchange of the plan that does not keep the norm."""
    return clipped(recipe.exchanges, recipe.config.train.max_grad_norm)


def clipping_with_policy(recipe: Recipe) -> BadInput | None:
    """Apply the clipping law to the settings that a policy may choose."""
    if recipe.policy is None or recipe.methods.chooses_exchange:
        return None
    near = RegisteredSettings()
    settings = [w for line in recipe.methods.exchange.lines for w in recipe.policy.to_measure(line.written, near)]
    built = [one for written in settings for one in ParameterRules.read(written, key="plan.adapt").exchanges]
    return clipped(built, recipe.config.train.max_grad_norm, key="plan.adapt")


def lossy_with_layout(recipe: Recipe) -> BadInput | None:
    """Check that `plan.lossy` has an effect: `auto` must choose something; `spec.unread_keys` checks the rest."""
    is_open = recipe.config.plan.sync == "auto" or recipe.sync.is_plain
    if not recipe.config.plan.lossy or (not recipe.in_stages and is_open):
        return None
    where = recipe.apart_by
    return bad_input(
        wanted="synchronous training without stages, as plan.lossy lets `plan.exchange: auto` choose a lossy exchange",
        got=where,
        do="leave plan.lossy out, and write a lossy exchange in plan.exchange or plan.sync if you want one",
        key="plan.lossy",
    )


def residuals_with_exchange(recipe: Recipe) -> BadInput | None:
    """Return an error for `plan.residuals_on_resume` where no exchange has residuals."""
    if recipe.config.plan.residuals_on_resume == _PLAN.residuals_on_resume or recipe.is_lossy:
        return None
    return bad_input(
        wanted="a lossy exchange with error feedback, which has residuals",
        got=f"plan.exchange {exchange_told(recipe.plan.exchange)}",
        do="leave plan.residuals_on_resume out",
        key="plan.residuals_on_resume",
    )


def exchange_told(written: Exchanges) -> str:
    """Return `plan.exchange` as written, or a phrase for a list of them."""
    return "a list of them" if isinstance(written, list) else told(written)
