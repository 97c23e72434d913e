"""The laws of adversarial training: whole models in one process each, and gradients at every step."""

from __future__ import annotations

from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_KEY = "train.adversarial"
_AHEAD = "train.adversarial.ahead"
_OFF = "set train.adversarial.epsilon to 0"


def adversarial_with_layout(recipe: Recipe) -> BadInput | None:
    """Return an error for adversarial training of a model in stages, with local updates or with sharded parameters."""
    if not recipe.config.train.adversarial.epsilon:
        return None
    if recipe.in_stages or not recipe.sync.is_plain:
        return bad_input(
            wanted="no pipeline stages and a gradient exchange at every step, for adversarial training",
            got=recipe.apart_by,
            do=_OFF,
            key=_KEY,
        )
    if recipe.sharding.takes_parameters:
        return bad_input(
            wanted="plan.sharding none, zero1 or zero2: adversarial training computes with the full parameters",
            got=told(recipe.plan.sharding),
            do=f"set plan.sharding to zero2, or {_OFF.removeprefix('set ')}",
            key=_KEY,
        )
    schedule = recipe.plan.pipeline_schedule
    if MethodConfig.parse(schedule).name != "single_stage":
        got = f"plan.pipeline_schedule {told(schedule)}"
        return bad_input(wanted="plan.pipeline_schedule single_stage or auto", got=got, do=_OFF, key=_KEY)
    return None


def adversarial_with_training(recipe: Recipe) -> BadInput | None:
    """Return an error for adversarial training with what computes or checks gradients of the plain loss alone."""
    config = recipe.config
    if not config.train.adversarial.epsilon:
        return None
    if recipe.optimizer.has_one_clip:
        return bad_input(
            wanted="an optimizer that follows gradients alone with adversarial training, where layers see their inputs "
            "in three passes",
            got=told(config.train.optimizer),
            do="set train.optimizer to sgd or adamw, or " + _OFF,
            key=OPTIMIZER,
        )
    if config.train.precision == "fp16":
        return bad_input(
            wanted="fp32 or bf16 with adversarial training: gradients of inputs are not scaled, and vanish in fp16",
            got="fp16",
            do="set train.precision to bf16 or fp32",
            key="train.precision",
        )
    if config.model.compile:
        return bad_input(
            wanted="model.compile false with adversarial training, which exchanges weights and buffers between passes",
            got="true",
            do="set model.compile to false",
            key="model.compile",
        )
    if config.train.verify.every:
        return bad_input(
            wanted="no verification with adversarial training: other ranks redo a step with the plain loss",
            got=str(config.train.verify.every),
            do=f"set train.verify.every to 0, or {_OFF.removeprefix('set ')}",
            key="train.verify.every",
        )
    if config.train.prove == "always":
        return bad_input(
            wanted="train.prove auto or never with adversarial training: the proof takes the plain loss",
            got="always",
            do="set train.prove to auto",
            key="train.prove",
        )
    return None


def adversarial_ahead(recipe: Recipe) -> BadInput | None:
    """Return an error for a companion process that could not compute what the rank itself would."""
    settings = recipe.config.train.adversarial
    if not settings.has_companion:
        return None
    if not settings.delay:
        return bad_input(
            wanted="train.adversarial.delay 1 with ahead: a perturbation that is computed a step early has the weights "
            "of the step before",
            got="0",
            do=f"set train.adversarial.delay to 1, or {_AHEAD} to false",
            key="train.adversarial.delay",
        )
    if recipe.methods.savers:
        return bad_input(
            wanted=f"no plan.savers with {_AHEAD}: the companion process runs the model as it is",
            got=", ".join(told(one) for one in recipe.plan.savers),
            do=f"set plan.savers to none, or {_AHEAD} to false",
            key="plan.savers",
        )
    return None
