"""The laws of losses with a teacher: what they do not go with, and where the course of one would part on ranks."""

from __future__ import annotations

from gossamer.loss.expert_distillation import ExpertDistillation
from gossamer.loss.hidden import Hidden, distillation_in
from gossamer.recipe.conflicts._beside import ADAPTER, ADVERSARIAL, COMPILED, SIDE, STAGES, Beside, refused_beside
from gossamer.recipe.recipe import Recipe
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import MethodConfig, told

_KEY = "train.loss"
_IN_PLACE = Beside(
    "parameters that are there all the time, in one place",
    lambda r: r.sharding.takes_parameters or r.sharding.is_tiered,
    lambda r: f"plan.sharding {told(r.plan.sharding)}",
)
_UNSAVED = Beside(
    "no savers, which may run a block twice",
    lambda r: bool(r.plan.savers),
    lambda r: f"plan.savers {', '.join(map(told, r.plan.savers))}",
)
_BESIDE_HIDDEN = (
    STAGES,
    _IN_PLACE,
    Beside(
        "gradients that are averaged at every step",
        lambda r: not r.sync.is_plain,
        lambda r: f"plan.sync {told(r.plan.sync)}",
    ),
    _UNSAVED,
    COMPILED,
    ADAPTER,
    SIDE,
)
_BESIDE_EXPERTS = (
    STAGES,
    _IN_PLACE,
    Beside(
        "gradients of the loss",
        lambda r: r.sync.probe is not None,
        lambda r: f"plan.sync {told(r.plan.sync)}",
    ),
    _UNSAVED,
    COMPILED,
    ADAPTER,
    SIDE,
    ADVERSARIAL,
)


def teacher_with_training(recipe: Recipe) -> BadInput | None:
    """Return an error for a distillation without a teacher, or with what computes the plain loss."""
    found, config = recipe.loss_of(recipe.config), recipe.config
    loss = distillation_in(found)
    if loss is None:
        return None
    name = MethodConfig.parse(config.train.loss).name
    if not loss.teacher.strip():
        inside = "output: {kl: {teacher: FOLDER}}" if isinstance(found, Hidden) else "teacher: FOLDER"
        do = f"write train.loss: {{{name}: {{{inside}}}}}"
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


def teacher_with_ranks(recipe: Recipe) -> BadInput | None:
    """Return an error for ranks that are to hold a teacher, and are not there or compute no loss."""
    loss = distillation_in(recipe.loss_of(recipe.config))
    if loss is None or not loss.teacher_ranks:
        return None
    able = recipe.plan.axes.groups("replica")[-1]
    wrong = [rank for rank in loss.teacher_ranks if rank not in able]
    if not wrong:
        return None
    name = MethodConfig.parse(recipe.config.train.loss).name
    return bad_input(
        wanted=f"teacher_ranks of those that compute the loss: {', '.join(map(str, able))}",
        got=", ".join(map(str, wrong)),
        do="name others, or leave teacher_ranks out",
        key=f"{_KEY}.{name}.teacher_ranks",
    )


def course_with_training(recipe: Recipe) -> BadInput | None:
    """Return an error for an adaptive distillation where its course would not be the same on all ranks, or not end."""
    loss, config = distillation_in(recipe.loss_of(recipe.config)), recipe.config
    if loss is None or not loss.is_adaptive:
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


def hidden_states_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for a match of hidden states beside what keeps blocks elsewhere, or runs them otherwise."""
    if not isinstance(recipe.loss_of(recipe.config), Hidden):
        return None
    return refused_beside(
        recipe,
        _BESIDE_HIDDEN,
        why=", as the loss hidden reads what blocks return",
        do="use the distillation of outputs alone (train.loss: {kl: {teacher: FOLDER}})",
        key=_KEY,
    )


def experts_alone(recipe: Recipe) -> BadInput | None:
    """Return an error for an expert-wise distillation without a teacher, or beside what keeps experts elsewhere."""
    loss = recipe.loss_of(recipe.config)
    if not isinstance(loss, ExpertDistillation):
        return None
    if not loss.teacher.strip():
        return bad_input(
            wanted="a teacher for expert_distillation, the model that was pruned",
            got="none",
            do="write train.loss: {expert_distillation: {teacher: FOLDER}}",
            key=_KEY,
        )
    return refused_beside(
        recipe,
        _BESIDE_EXPERTS,
        why=", as the loss expert_distillation reads what experts return",
        do="set train.loss to next_token",
        key=_KEY,
    )
