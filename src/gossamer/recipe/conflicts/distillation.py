"""The laws of losses with a teacher: what they do not go with, and where the course of one would part on ranks."""

from __future__ import annotations

from gossamer.loss._distillation import Distillation
from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_KEY = "train.loss"


def teacher_with_training(recipe: Recipe) -> BadInput | None:
    """Return an error for a distillation without a teacher, or with what computes the plain loss."""
    loss, config = recipe.loss_of(recipe.config), recipe.config
    if not isinstance(loss, Distillation):
        return None
    name = MethodConfig.parse(config.train.loss).name
    if not loss.teacher.strip():
        do = f"write train.loss: {{{name}: {{teacher: FOLDER}}}}"
        return bad_input(wanted=f"a teacher for {name}", got="none", do=do, key=_KEY)
    if config.train.adversarial.epsilon:
        return bad_input(
            wanted="train.adversarial.epsilon 0 with a teacher, which would see perturbed inputs",
            got=f"{config.train.adversarial.epsilon:g}",
            do="set train.adversarial.epsilon to 0",
            key="train.adversarial",
        )
    if any(MethodConfig.parse(one).name == "cut_cross_entropy" for one in recipe.plan.savers):
        return bad_input(
            wanted="plan.savers without cut_cross_entropy with a teacher, whose loss computes its logits in tiles",
            got="cut_cross_entropy",
            do="leave it out",
            key="plan.savers",
        )
    return None


def course_with_training(recipe: Recipe) -> BadInput | None:
    """Return an error for an adaptive distillation where its course would not be the same on all ranks, or not end."""
    loss, config = recipe.loss_of(recipe.config), recipe.config
    if not isinstance(loss, Distillation) or not loss.is_adaptive:
        return None
    name = MethodConfig.parse(config.train.loss).name
    if not recipe.sync.is_plain:
        return bad_input(
            wanted=f"plan.sync every_step with {name}, whose t follows the loss of all ranks at every step",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="set plan.sync to every_step, or train.loss to kl",
            key=_KEY,
        )
    if config.train.seconds:
        return bad_input(
            wanted=f"train.steps alone with {name}, whose t reaches its end with the last step",
            got=f"train.seconds {config.train.seconds:g}",
            do="leave train.seconds out, or set train.loss to kl",
            key=_KEY,
        )
    return None
