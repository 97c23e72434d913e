"""The laws in the order of their checks: each asks a plan's methods for the properties that they declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.recipe.recipe import OPTIMIZER, Recipe
from gossamer.spec.config import PlanSection, RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, MethodConfig, told
from gossamer.spec.plan import Plan
from gossamer.spec.unread_keys import check_given, without_stages
from gossamer.sync import OuterLoopConfig

Law: TypeAlias = Callable[[Recipe], BadInput | None]
_PLAN = PlanSection()
_WHOLE = "leave plan.sharding at none"


def _sync_in_stages(recipe: Recipe) -> BadInput | None:
    if recipe.sync.is_plain or recipe.stages == 1:
        return None
    where = "islands train apart" if recipe.sync.loop is not None else "losses alone decide"
    return bad_input(
        wanted=f"every process to hold the whole model, where {where}",
        got=f"a model in {recipe.stages} stages",
        do="leave plan.mesh.pipe at 1, or plan.sync at every_step",
        key="plan.sync",
    )


def _rule_begins_apart(recipe: Recipe) -> BadInput | None:
    if recipe.sync.level(0) == "all" or recipe.optimizer.begins_apart:
        return None
    return bad_input(
        wanted="first steps in which all gradients meet, as in others this rule's second moment stays as it is",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="give plan.sync warmup_steps, of a tenth of the run, say",
        key=OPTIMIZER,
    )


def _sync_open(recipe: Recipe) -> BadInput | None:
    if recipe.plan.sync != "auto" or recipe.plan.exchange == "auto":
        return None
    return bad_input(
        wanted="an exchange that is chosen with it",
        got=f"plan.exchange {_said(recipe.plan.exchange)}",
        do="leave plan.exchange at auto, or name a method of `gossamer methods sync`",
        key="plan.sync",
    )


def _probe_exchanges_nothing(recipe: Recipe) -> BadInput | None:
    if recipe.sync.probe is None or recipe.plan.exchange in ("auto", "dense"):
        return None
    return bad_input(
        wanted="no exchange of gradients, where losses alone decide",
        got=_said(recipe.plan.exchange),
        do="leave plan.exchange at auto",
        key="plan.exchange",
    )


def _said(written: Exchanges) -> str:
    return "a list of them" if isinstance(written, list) else told(written)


def clipped(
    exchanges: Sequence[Exchange], clip: float, *, key: str = "plan.exchange", clip_key: str = "train.max_grad_norm"
) -> BadInput | None:
    """Return an error for gradient clipping around an exchange whose result does not have the gradient's norm."""
    inside = [one for outer in exchanges for one in exchange_methods.nested(outer)]
    wrong = next((one for one in inside if not one.has_true_norm), None)
    if not clip or wrong is None:
        return None
    return bad_input(
        wanted=f"no clipping around the exchange `{_name(wrong)}`, whose norm is mostly its code's error",
        got=f"{clip_key} {clip:g}",
        do=f"set {clip_key} to 0",
        key=key,
    )


def _name(method: Exchange) -> str:
    """Return the method's name, that of its file."""
    return type(method).__module__.rpartition(".")[2]


def _clip(recipe: Recipe) -> BadInput | None:
    return clipped(recipe.exchanges, recipe.config.train.max_grad_norm)


def _clip_adapted(recipe: Recipe) -> BadInput | None:
    """Apply the clipping law to the settings that a policy may choose."""
    if recipe.policy is None or recipe.methods.chooses_exchange:
        return None
    settings = [w for line in recipe.methods.exchange.lines for w in recipe.policy.to_measure(line.written)]
    built = [one for written in settings for one in ParameterRules.read(written, key="plan.adapt").written]
    return clipped(built, recipe.config.train.max_grad_norm, key="plan.adapt")


def _islands_in_stages(recipe: Recipe) -> BadInput | None:
    if recipe.stages == 1 or recipe.methods.chooses_exchange or not recipe.methods.exchange.asks_for_islands:
        return None
    return bad_input(
        wanted="an exchange among the ranks of a stage, which are all alike",
        got=f"one that speaks of islands, for a model in {recipe.stages} stages",
        do="name the method that is to go between them for all, or leave plan.mesh.pipe at 1",
        key="plan.exchange",
    )


def _adapts_what_meets(recipe: Recipe) -> BadInput | None:
    if recipe.policy is None or recipe.sync.is_plain:
        return None
    by_paths = recipe.sync.loop is not None and recipe.policy.needs_paths
    if not by_paths:
        gradients = "gradients that all ranks exchange at every step, which is what"
        return bad_input(
            wanted=f"bcrs, or {gradients} other policies adapt" if recipe.sync.loop else f"{gradients} a policy adapts",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="leave plan.adapt at none",
            key="plan.adapt",
        )
    if not recipe.sync.names_exchange:
        return bad_input(
            wanted="a plan.sync whose exchange between islands can be set, as diloco's can",
            got=f"plan.sync {told(recipe.plan.sync)}",
            do="leave plan.adapt at none, or name another plan.sync",
            key="plan.adapt",
        )
    return None


def _adapts_ways(recipe: Recipe) -> BadInput | None:
    islands = recipe.plan.islands
    if recipe.policy is None or recipe.sync.is_plain or all(len(island) == 1 for island in islands):
        return None
    return bad_input(
        wanted="islands of one rank each, whose ways out are known",
        got=str([list(island) for island in islands]),
        do="leave plan.adapt at none, and name plan.sync's exchange",
        key="plan.adapt",
    )


def _adapts_links(recipe: Recipe) -> BadInput | None:
    if recipe.policy is None or recipe.policy.for_links == (recipe.stages > 1):
        return None
    if recipe.stages > 1:
        return bad_input(
            wanted="a policy for the links between stages, ada_topk",
            got=f"{told(recipe.config.plan.adapt)} for a model in {recipe.stages} stages",
            do="name another, leave plan.adapt at none, or plan.mesh.pipe at 1",
            key="plan.adapt",
        )
    return bad_input(
        wanted="a policy for gradients",
        got=f"{told(recipe.config.plan.adapt)}, which is for the links between stages of a model (plan.mesh.pipe)",
        do="name another: gossamer methods policy",
        key="plan.adapt",
    )


def _adapts_as_it_goes(recipe: Recipe) -> BadInput | None:
    """Check `adapt_every` and `adapt_window`: stage boundaries and exchanges between islands are chosen once, before
    step 1.
    """
    asked, before = recipe.config.plan, recipe.stages > 1 or recipe.sync.loop is not None
    for key in ("adapt_every", "adapt_window"):
        if before and getattr(asked, key) != getattr(_PLAN, key):
            where = f"a model in {recipe.stages} stages" if recipe.stages > 1 else f"plan.sync {told(recipe.plan.sync)}"
            return bad_input(
                wanted="a policy that chooses as the run goes on",
                got=f"one that chooses before the first step, for {where}",
                do=f"leave plan.{key} out",
                key=f"plan.{key}",
            )
    return None


def _states_of_whole_replicas(recipe: Recipe) -> BadInput | None:
    sharding, schedule = recipe.sharding, recipe.plan.pipeline_schedule
    if not sharding.is_sharded:
        return None
    key, do = "plan.sharding", _WHOLE
    if recipe.stages == 1 and sharding.takes_parameters and MethodConfig.parse(schedule).name != "single_stage":
        got = f"plan.pipeline_schedule {told(schedule)}"
        return bad_input(wanted="plan.pipeline_schedule single_stage, for sharded parameters", got=got, do=do, key=key)
    if recipe.stages > 1 or recipe.sync.probe is not None:
        got = f"a model in {recipe.stages} stages" if recipe.stages > 1 else f"plan.sync {told(recipe.plan.sync)}"
        return bad_input(wanted="whole replicas whose gradients meet, for sharded states", got=got, do=do, key=key)
    return None


def _states_apart(recipe: Recipe) -> BadInput | None:
    """Check that the sharding keeps states inside each island, as local-update training needs."""
    sharding, loop = recipe.sharding, recipe.sync.loop
    if not sharding.is_sharded or loop is None:
        return None
    key, got = "plan.sharding", told(recipe.plan.sharding)
    if sharding.takes_parameters or sharding.differences is not None:
        return bad_input(
            wanted="zero1 or zero2, where islands train apart: what meets between them is whole parameters, as each "
            "rank holds them",
            got=got,
            do="write plan.sharding: {zero1: {shard_group: island}} or {zero2: {shard_group: island}}, or "
            "plan.sync: every_step",
            key=key,
        )
    if loop.average_second_moments_every:
        return bad_input(
            wanted="whole states, where islands bring their second moments together",
            got=got,
            do="leave average_second_moments_every out of plan.sync, or write plan.sharding: none",
            key=key,
        )
    if not sharding.needs_islands:
        name = MethodConfig.parse(recipe.plan.sharding).name
        return bad_input(
            wanted="states that are shared out inside every island, where islands train apart: each has its own",
            got=f"{got}, over all ranks",
            do=f"write plan.sharding: {{{name}: {{shard_group: island}}}}",
            key=key,
        )
    return None


def _states_adapted(recipe: Recipe) -> BadInput | None:
    if not recipe.sharding.is_sharded or recipe.policy is None:
        return None
    got = f"plan.adapt {told(recipe.config.plan.adapt)}, which measures whole mean gradients"
    wanted = "no policy, where a rank knows the mean of its own rows alone"
    return bad_input(wanted=wanted, got=got, do=_WHOLE, key="plan.sharding")


def _states_by_element(recipe: Recipe) -> BadInput | None:
    if not recipe.sharding.is_sharded or recipe.optimizer.by_element:
        return None
    return bad_input(
        wanted="a rule that moves each number by itself, such as adamw, as no rank sees a whole parameter",
        got=f"train.optimizer {told(recipe.config.train.optimizer)}",
        do=_WHOLE,
        key="plan.sharding",
    )


def _gathers_in_step(recipe: Recipe) -> BadInput | None:
    counts = recipe.plan.microbatches
    if not recipe.sharding.takes_parameters or len(set(counts)) == 1:
        return None
    return bad_input(
        wanted="as many micro-batches on every replica, as all gather parameters together",
        got=str(list(counts)),
        do="plan again, or leave plan.sharding at zero2",
        key="plan.sharding",
    )


def _probe_moves_plainly(recipe: Recipe) -> BadInput | None:
    if recipe.sync.probe is None or recipe.optimizer.is_plain:
        return None
    return bad_input(
        wanted="sgd without momentum or weight decay, where losses alone decide: all that moves the parameters is "
        "then what the ranks have told each other",
        got=told(recipe.config.train.optimizer),
        do="set train.optimizer to {sgd: {lr: 1e-4}}; rates are much smaller than for gradients",
        key=OPTIMIZER,
    )


def _probe_scales_nothing(recipe: Recipe) -> BadInput | None:
    if recipe.sync.probe is None or recipe.config.train.precision != "fp16":
        return None
    return bad_input(
        wanted="fp32 or bf16, where there is no backward pass whose loss could be scaled",
        got="fp16",
        do="set train.precision to fp32: the differences of losses are small",
        key="train.precision",
    )


def _rule_of_islands(recipe: Recipe) -> BadInput | None:
    try:
        recipe.optimizer_with(1.0)
    except BadInput as error:
        return error
    return None


def _verified(recipe: Recipe) -> BadInput | None:
    key = "train.verify.every"
    if not recipe.config.train.verify.every:
        return None
    if recipe.stages > 1 or not recipe.sync.is_plain:
        got = f"a model in {recipe.stages} stages" if recipe.stages > 1 else f"plan.sync {told(recipe.plan.sync)}"
        wanted = "whole replicas that hold the same at every step, by gradients, so that each can do another's work"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sync to every_step", key=key)
    if recipe.sharding.is_sharded:
        wanted = "plan.sharding none, as a rank that updates its rows wrongly gives all the others the same wrong ones"
        got = f"plan.sharding {told(recipe.plan.sharding)}"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sharding to none", key=key)
    replicas = recipe.plan.mesh.replica
    if replicas < 3:
        do = "set it to 0, or machines.processes to 3 or more"
        return bad_input(wanted="3 replicas, of which two can outvote one", got=str(replicas), do=do, key=key)
    return None


def _proved(recipe: Recipe) -> BadInput | None:
    if recipe.config.train.prove != "always" or recipe.sync.probe is None:
        return None
    return bad_input(
        wanted="gradients, which a proof compares with those of one process",
        got=f"plan.sync {told(recipe.plan.sync)}, which has none",
        do="leave train.prove at auto",
        key="train.prove",
    )


def _seconds_of_steps(recipe: Recipe) -> BadInput | None:
    if not recipe.config.train.seconds or (recipe.plan.sync != "auto" and recipe.sync.is_plain):
        return None
    return bad_input(
        wanted="steps in which all ranks meet, for a number of them that time decides",
        got=f"plan.sync {told(recipe.plan.sync)}",
        do="set it to 0 and say the steps in train.steps, or set plan.sync to every_step",
        key="train.seconds",
    )


def _borders(recipe: Recipe) -> BadInput | None:
    plan = recipe.plan
    if recipe.stages == 1 and plan.cuts:
        return without_stages("plan.cuts")
    if recipe.stages == 1 and plan.activation_compression != _PLAN.activation_compression:
        return without_stages("plan.activation_compression")
    if isinstance(plan.activation_compression, tuple) and len(plan.activation_compression) != recipe.stages - 1:
        return bad_input(
            wanted=f"one way for each of the {recipe.stages - 1} borders between {recipe.stages} stages",
            got=f"{len(plan.activation_compression)}",
            do="list as many, or give one for all",
            key="plan.activation_compression",
        )
    if plan.cuts and len(plan.cuts) != recipe.stages:
        return bad_input(
            wanted=f"the first unit of each of {recipe.stages} stages",
            got=f"{len(plan.cuts)} ({', '.join(plan.cuts)})",
            do="list as many as there are stages (plan.mesh.pipe), the first of them 0",
            key="plan.cuts",
        )
    return None


def _everybody_on_an_island(recipe: Recipe) -> BadInput | None:
    islands, ranks = recipe.plan.islands, recipe.plan.ranks
    if not islands or (all(islands) and sorted(r for island in islands for r in island) == list(range(ranks))):
        return None
    return bad_input(
        wanted=f"every rank from 0 to {ranks - 1} on exactly one island",
        got=str([list(island) for island in islands]),
        do="list the ranks of every island, or write auto",
        key="machines.islands",
    )


def _lossy_is_asked(recipe: Recipe) -> BadInput | None:
    """Check that `plan.lossy` has an effect: `auto` must choose something; `spec.unread_keys` checks the rest."""
    is_open = recipe.config.plan.sync == "auto" or recipe.sync.is_plain
    if not recipe.config.plan.lossy or (recipe.stages == 1 and is_open):
        return None
    where = f"a model in {recipe.stages} stages" if recipe.stages > 1 else f"plan.sync {told(recipe.plan.sync)}"
    return bad_input(
        wanted="whole replicas whose gradients meet at every step, for which an exchange is chosen",
        got=where,
        do="leave plan.lossy out, and name an exchange where one is to lose something",
        key="plan.lossy",
    )


def _residuals_are_kept(recipe: Recipe) -> BadInput | None:
    if recipe.config.plan.residuals_on_resume == _PLAN.residuals_on_resume or recipe.is_lossy:
        return None
    return bad_input(
        wanted="an exchange that may lose something, and keeps it",
        got=f"plan.exchange {_said(recipe.plan.exchange)}",
        do="leave plan.residuals_on_resume out",
        key="plan.residuals_on_resume",
    )


LAWS: tuple[Law, ...] = (
    _everybody_on_an_island,
    _borders,
    _sync_in_stages,
    _rule_begins_apart,
    _sync_open,
    _probe_exchanges_nothing,
    _clip,
    _clip_adapted,
    _islands_in_stages,
    _adapts_what_meets,
    _adapts_links,
    _states_of_whole_replicas,
    _states_apart,
    _states_adapted,
    _adapts_ways,
    _states_by_element,
    _gathers_in_step,
    _probe_moves_plainly,
    _probe_scales_nothing,
    _rule_of_islands,
    _verified,
    _proved,
    _seconds_of_steps,
    _adapts_as_it_goes,
    _lossy_is_asked,
    _residuals_are_kept,
)


def check(config: RunConfig, plan: Plan) -> Recipe:
    """Build the methods of a plan and its configuration, check that they can be combined, and return them.

    Raises BadInput that names the key at fault: for an unknown method, for two methods that exclude each other, or for
    a key that has no effect.
    """
    check_given(config)
    recipe = Recipe.of(config, plan)
    for law in LAWS:
        if (error := law(recipe)) is not None:
            raise error
    return recipe


def not_used_inside(loop: OuterLoopConfig, islands: Sequence[Sequence[int]], exchange: Exchanges) -> str:
    """Return why the gradient exchange is never used in local-update training; "" if it is used."""
    if exchange == "dense" or not loop.apart(0) or not islands or any(len(island) > 1 for island in islands):
        return ""
    return f"{_said(exchange)} is not used: every island is one rank, which meets nobody inside of it"
