"""The laws in the order of their checks: each asks a plan's methods for the properties that they declare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange
from gossamer.plan.law._terms import RULE, Terms, rule_of
from gossamer.spec.config import PlanSection
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges, MethodConfig, told
from gossamer.spec.unread_keys import without_stages
from gossamer.sync import OuterLoopConfig

Law: TypeAlias = Callable[[Terms], BadInput | None]
_PLAN = PlanSection()
_WHOLE = "leave plan.sharding at none"


def _sync_in_stages(terms: Terms) -> BadInput | None:
    if terms.sync.is_plain or terms.stages == 1:
        return None
    where = "islands train apart" if terms.sync.loop is not None else "losses alone decide"
    return bad_input(
        wanted=f"every process to hold the whole model, where {where}",
        got=f"a model in {terms.stages} stages",
        do="leave plan.mesh.pipe at 1, or plan.sync at every_step",
        key="plan.sync",
    )


def _rule_begins_apart(terms: Terms) -> BadInput | None:
    if terms.sync.level(0) == "all" or terms.rule.begins_apart:
        return None
    return bad_input(
        wanted="first steps in which all gradients meet, as in others this rule's second moment stays as it is",
        got=f"plan.sync {told(terms.plan.sync)}",
        do="give plan.sync warmup_steps, of a tenth of the run, say",
        key=RULE,
    )


def _sync_open(terms: Terms) -> BadInput | None:
    if terms.plan.sync != "auto" or terms.plan.exchange == "auto":
        return None
    return bad_input(
        wanted="an exchange that is chosen with it",
        got=f"plan.exchange {_said(terms.plan.exchange)}",
        do="leave plan.exchange at auto, or name a method of `gossamer methods sync`",
        key="plan.sync",
    )


def _probe_exchanges_nothing(terms: Terms) -> BadInput | None:
    if terms.sync.probe is None or terms.plan.exchange in ("auto", "dense"):
        return None
    return bad_input(
        wanted="no exchange of gradients, where losses alone decide",
        got=_said(terms.plan.exchange),
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


def _clip(terms: Terms) -> BadInput | None:
    return clipped(terms.exchanges, terms.config.train.max_grad_norm)


def _clip_adapted(terms: Terms) -> BadInput | None:
    """Apply the clipping law to the settings that a policy may choose."""
    if terms.policy is None or terms.exchange is None:
        return None
    settings = [w for line in terms.exchange.lines for w in terms.policy.to_measure(line.written)]
    built = [exchange_methods.build(written, key="plan.adapt") for written in settings]
    return clipped(built, terms.config.train.max_grad_norm, key="plan.adapt")


def _islands_in_stages(terms: Terms) -> BadInput | None:
    if terms.stages == 1 or terms.exchange is None or not exchange_methods.asks_for_islands(terms.plan.exchange):
        return None
    return bad_input(
        wanted="an exchange among the ranks of a stage, which are all alike",
        got=f"one that speaks of islands, for a model in {terms.stages} stages",
        do="name the method that is to go between them for all, or leave plan.mesh.pipe at 1",
        key="plan.exchange",
    )


def _adapts_what_meets(terms: Terms) -> BadInput | None:
    if terms.policy is None or terms.sync.is_plain:
        return None
    by_paths = terms.sync.loop is not None and terms.policy.needs_paths
    if not by_paths:
        gradients = "gradients that all ranks exchange at every step, which is what"
        return bad_input(
            wanted=f"bcrs, or {gradients} other policies adapt" if terms.sync.loop else f"{gradients} a policy adapts",
            got=f"plan.sync {told(terms.plan.sync)}",
            do="leave plan.adapt at none",
            key="plan.adapt",
        )
    if not terms.sync.names_exchange:
        return bad_input(
            wanted="a plan.sync whose exchange between islands can be set, as diloco's can",
            got=f"plan.sync {told(terms.plan.sync)}",
            do="leave plan.adapt at none, or name another plan.sync",
            key="plan.adapt",
        )
    return None


def _adapts_ways(terms: Terms) -> BadInput | None:
    islands = terms.plan.islands
    if terms.policy is None or terms.sync.is_plain or all(len(island) == 1 for island in islands):
        return None
    return bad_input(
        wanted="islands of one rank each, whose ways out are known",
        got=str([list(island) for island in islands]),
        do="leave plan.adapt at none, and name plan.sync's exchange",
        key="plan.adapt",
    )


def _adapts_links(terms: Terms) -> BadInput | None:
    if terms.policy is None or terms.policy.for_links == (terms.stages > 1):
        return None
    if terms.stages > 1:
        return bad_input(
            wanted="a policy for the links between stages, ada_topk",
            got=f"{told(terms.config.plan.adapt)} for a model in {terms.stages} stages",
            do="name another, leave plan.adapt at none, or plan.mesh.pipe at 1",
            key="plan.adapt",
        )
    return bad_input(
        wanted="a policy for gradients",
        got=f"{told(terms.config.plan.adapt)}, which is for the links between stages of a model (plan.mesh.pipe)",
        do="name another: gossamer methods policy",
        key="plan.adapt",
    )


def _adapts_as_it_goes(terms: Terms) -> BadInput | None:
    """Check `adapt_every` and `adapt_window`: stage boundaries and exchanges between islands are chosen once, before
    step 1.
    """
    asked, before = terms.config.plan, terms.stages > 1 or terms.sync.loop is not None
    for key in ("adapt_every", "adapt_window"):
        if before and getattr(asked, key) != getattr(_PLAN, key):
            where = f"a model in {terms.stages} stages" if terms.stages > 1 else f"plan.sync {told(terms.plan.sync)}"
            return bad_input(
                wanted="a policy that chooses as the run goes on",
                got=f"one that chooses before the first step, for {where}",
                do=f"leave plan.{key} out",
                key=f"plan.{key}",
            )
    return None


def _states_of_whole_replicas(terms: Terms) -> BadInput | None:
    sharding, schedule = terms.sharding, terms.plan.pipeline_schedule
    if not sharding.is_sharded:
        return None
    key, do = "plan.sharding", _WHOLE
    if terms.stages == 1 and sharding.takes_parameters and MethodConfig.parse(schedule).name != "single_stage":
        got = f"plan.pipeline_schedule {told(schedule)}"
        return bad_input(wanted="plan.pipeline_schedule single_stage, for sharded parameters", got=got, do=do, key=key)
    if terms.stages > 1 or terms.sync.probe is not None:
        got = f"a model in {terms.stages} stages" if terms.stages > 1 else f"plan.sync {told(terms.plan.sync)}"
        return bad_input(wanted="whole replicas whose gradients meet, for sharded states", got=got, do=do, key=key)
    return None


def _states_apart(terms: Terms) -> BadInput | None:
    """Check that the sharding keeps states inside each island, as local-update training needs."""
    sharding, loop = terms.sharding, terms.sync.loop
    if not sharding.is_sharded or loop is None:
        return None
    key, got = "plan.sharding", told(terms.plan.sharding)
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
        name = MethodConfig.parse(terms.plan.sharding).name
        return bad_input(
            wanted="states that are shared out inside every island, where islands train apart: each has its own",
            got=f"{got}, over all ranks",
            do=f"write plan.sharding: {{{name}: {{shard_group: island}}}}",
            key=key,
        )
    return None


def _states_adapted(terms: Terms) -> BadInput | None:
    if not terms.sharding.is_sharded or terms.policy is None:
        return None
    got = f"plan.adapt {told(terms.config.plan.adapt)}, which measures whole mean gradients"
    wanted = "no policy, where a rank knows the mean of its own rows alone"
    return bad_input(wanted=wanted, got=got, do=_WHOLE, key="plan.sharding")


def _states_by_element(terms: Terms) -> BadInput | None:
    if not terms.sharding.is_sharded or terms.rule.by_element:
        return None
    return bad_input(
        wanted="a rule that moves each number by itself, such as adamw, as no rank sees a whole parameter",
        got=f"train.optimizer {told(terms.config.train.optimizer)}",
        do=_WHOLE,
        key="plan.sharding",
    )


def _gathers_in_step(terms: Terms) -> BadInput | None:
    counts = terms.plan.microbatches
    if not terms.sharding.takes_parameters or len(set(counts)) == 1:
        return None
    return bad_input(
        wanted="as many micro-batches on every replica, as all gather parameters together",
        got=str(list(counts)),
        do="plan again, or leave plan.sharding at zero2",
        key="plan.sharding",
    )


def _probe_moves_plainly(terms: Terms) -> BadInput | None:
    if terms.sync.probe is None or terms.rule.is_plain:
        return None
    return bad_input(
        wanted="sgd without momentum or weight decay, where losses alone decide: all that moves the parameters is "
        "then what the ranks have told each other",
        got=told(terms.config.train.optimizer),
        do="set train.optimizer to {sgd: {lr: 1e-4}}; rates are much smaller than for gradients",
        key=RULE,
    )


def _probe_scales_nothing(terms: Terms) -> BadInput | None:
    if terms.sync.probe is None or terms.config.train.precision != "fp16":
        return None
    return bad_input(
        wanted="fp32 or bf16, where there is no backward pass whose loss could be scaled",
        got="fp16",
        do="set train.precision to fp32: the differences of losses are small",
        key="train.precision",
    )


def _rule_of_islands(terms: Terms) -> BadInput | None:
    try:
        rule_of(terms)
    except BadInput as error:
        return error
    return None


def _verified(terms: Terms) -> BadInput | None:
    key = "train.verify.every"
    if not terms.config.train.verify.every:
        return None
    if terms.stages > 1 or not terms.sync.is_plain:
        got = f"a model in {terms.stages} stages" if terms.stages > 1 else f"plan.sync {told(terms.plan.sync)}"
        wanted = "whole replicas that hold the same at every step, by gradients, so that each can do another's work"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sync to every_step", key=key)
    if terms.sharding.is_sharded:
        wanted = "plan.sharding none, as a rank that updates its rows wrongly gives all the others the same wrong ones"
        got = f"plan.sharding {told(terms.plan.sharding)}"
        return bad_input(wanted=wanted, got=got, do="set it to 0, or plan.sharding to none", key=key)
    replicas = terms.plan.mesh.replica
    if replicas < 3:
        do = "set it to 0, or machines.processes to 3 or more"
        return bad_input(wanted="3 replicas, of which two can outvote one", got=str(replicas), do=do, key=key)
    return None


def _proved(terms: Terms) -> BadInput | None:
    if terms.config.train.prove != "always" or terms.sync.probe is None:
        return None
    return bad_input(
        wanted="gradients, which a proof compares with those of one process",
        got=f"plan.sync {told(terms.plan.sync)}, which has none",
        do="leave train.prove at auto",
        key="train.prove",
    )


def _seconds_of_steps(terms: Terms) -> BadInput | None:
    if not terms.config.train.seconds or (terms.plan.sync != "auto" and terms.sync.is_plain):
        return None
    return bad_input(
        wanted="steps in which all ranks meet, for a number of them that time decides",
        got=f"plan.sync {told(terms.plan.sync)}",
        do="set it to 0 and say the steps in train.steps, or set plan.sync to every_step",
        key="train.seconds",
    )


def _borders(terms: Terms) -> BadInput | None:
    plan = terms.plan
    if terms.stages == 1 and plan.cuts:
        return without_stages("plan.cuts")
    if terms.stages == 1 and plan.activation_compression != _PLAN.activation_compression:
        return without_stages("plan.activation_compression")
    if isinstance(plan.activation_compression, tuple) and len(plan.activation_compression) != terms.stages - 1:
        return bad_input(
            wanted=f"one way for each of the {terms.stages - 1} borders between {terms.stages} stages",
            got=f"{len(plan.activation_compression)}",
            do="list as many, or give one for all",
            key="plan.activation_compression",
        )
    if plan.cuts and len(plan.cuts) != terms.stages:
        return bad_input(
            wanted=f"the first unit of each of {terms.stages} stages",
            got=f"{len(plan.cuts)} ({', '.join(plan.cuts)})",
            do="list as many as there are stages (plan.mesh.pipe), the first of them 0",
            key="plan.cuts",
        )
    return None


def _everybody_on_an_island(terms: Terms) -> BadInput | None:
    islands, ranks = terms.plan.islands, terms.plan.ranks
    if not islands or (all(islands) and sorted(r for island in islands for r in island) == list(range(ranks))):
        return None
    return bad_input(
        wanted=f"every rank from 0 to {ranks - 1} on exactly one island",
        got=str([list(island) for island in islands]),
        do="list the ranks of every island, or write auto",
        key="machines.islands",
    )


def _lossy_is_asked(terms: Terms) -> BadInput | None:
    """Check that `plan.lossy` has an effect: `auto` must choose something; `spec.unread_keys` checks the rest."""
    is_open = terms.config.plan.sync == "auto" or terms.sync.is_plain
    if not terms.config.plan.lossy or (terms.stages == 1 and is_open):
        return None
    where = f"a model in {terms.stages} stages" if terms.stages > 1 else f"plan.sync {told(terms.plan.sync)}"
    return bad_input(
        wanted="whole replicas whose gradients meet at every step, for which an exchange is chosen",
        got=where,
        do="leave plan.lossy out, and name an exchange where one is to lose something",
        key="plan.lossy",
    )


def _residuals_are_kept(terms: Terms) -> BadInput | None:
    if terms.config.plan.residuals_on_resume == _PLAN.residuals_on_resume or terms.is_lossy:
        return None
    return bad_input(
        wanted="an exchange that may lose something, and keeps it",
        got=f"plan.exchange {_said(terms.plan.exchange)}",
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


def not_used_inside(loop: OuterLoopConfig, islands: Sequence[Sequence[int]], exchange: Exchanges) -> str:
    """Return why the gradient exchange is never used in local-update training; "" if it is used."""
    if exchange == "dense" or not loop.apart(0) or not islands or any(len(island) > 1 for island in islands):
        return ""
    return f"{_said(exchange)} is not used: every island is one rank, which meets nobody inside of it"
