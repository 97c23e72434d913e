"""Verdicts in words: one line of success, or an error that names the first differing tensor and a likely cause."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.proof.compare import ProofCost
from gossamer.proof.trials import TrialSet
from gossamer.proof.verdict import Fault, Parting, ProofVerdict, first_of
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_seconds

_KEY = "train.prove"
_DO = "train in one process, move the split points (plan.cuts), or set train.prove: never to train in spite of this"


def line_of(
    verdict: ProofVerdict, cost: ProofCost, question: TrialSet, plan: Plan, config: RunConfig, seconds: float
) -> str:
    """Return the one-line summary of a successful proof: losses, gradients proved, their largest distance, and cost."""
    mine, one = verdict.losses
    each = " each" if verdict.own.apart is not None or verdict.own.writes else ""
    said = [
        f"{question.microbatches} micro-batches: {layout_of(plan)} = 1 process{each}",
        f"loss {mine:.4f} = {one:.4f}",
        f"{verdict.proved} of {verdict.tensors} gradients within {_far(verdict.within)} "
        f"({verdict.tensors - verdict.proved} not proved)",
    ]
    if not all(r.precision is question.rounds[0].precision for r in question.rounds):
        said.append(f"in {question.rounds[-1].precision.name} within {_far(verdict.within_coarse)}")
    if any(plan.boundary_of(stage) != "none" for stage in range(plan.mesh.pipe - 1)):
        said.append("not proved: activation compression")
    if config.model.compile:
        said.append("not proved: compiled code")
    work = f"{cost.microbatches} micro-batches of the whole model and {cost.builds} builds of it"
    said.append(f"{show_seconds(seconds)} for {work}")
    return ", ".join(said)


def refusal_of(verdict: ProofVerdict, plan: Plan) -> BadInput:
    """Return the error that ends a run whose parallel layout differs from one process."""
    if verdict.unsteady:
        name, others = verdict.unsteady[0], len(verdict.unsteady) - 1
        return bad_input(
            wanted="a constructor that gives the same initial values every time",
            got=f"different values of {name} in two builds on one rank{_and(others, 'initial value')}",
            do="draw from the default generators of torch, numpy or random, or seed your own generator in the "
            "constructor",
            key=_KEY,
        )
    first = first_of(verdict.faults)
    if verdict.parting is None and any(f.what == "loss" and f.round == first.round for f in verdict.faults):
        first = next(f for f in verdict.faults if f.what == "loss")
    same = {f.name for f in verdict.faults if f.what == first.what} - {first.name}
    parting = verdict.parting if first.what != "initial value" else None
    begun = "" if parting is None else f"{_value(parting)}; then "
    return bad_input(
        wanted=f"{layout_of(plan)} to compute the gradients of one process",
        got=f"{begun}{told_of(first)}{_with(verdict, first, len(same))}. {_cause(verdict, first)}",
        do=_DO,
        key=_KEY,
    )


def layout_of(plan: Plan) -> str:
    """Return the plan's stages and replicas in words."""
    stages, replicas = plan.mesh.pipe, plan.mesh.replica
    if plan.stage_ranks:
        return f"{stages} stages on {plan.ranks} ranks"
    if not plan.axes.in_stages:
        return f"{replicas} replicas"
    return f"{replicas} replicas of {stages} stages" if plan.axes.is_replicated else f"{stages} stages"


def warnings_of(verdict: ProofVerdict) -> Iterator[str]:
    """Yield warnings about replicas whose buffers or parameters may drift apart: they equal independent processes, but
    together not one process.
    """
    own = "each replica keeps buffers or other state for itself, so that together they are not one process"
    if verdict.own.apart is not None:
        yield f"{own}: {told_of(verdict.own.apart)}"
    elif verdict.own.counted:
        yield (
            f"{own}: {verdict.own.counted} is computed from the replica's own batches; no loss and no gradient of the "
            "proof depends on it, and a checkpoint saves that of the first replica"
        )
    if verdict.own.writes:
        yield "the forward writes to parameters, on each replica to its own copy: the copies may drift apart"


def told_of(fault: Fault) -> str:
    """Describe one fault in words: the tensor or loss that differs, and by how much."""
    if fault.what == "initial value":
        norms = f" (norm {fault.got:.6g}, {fault.wanted:.6g} in one process)" if fault.got != fault.wanted else ""
        return f"a different initial value of {fault.name} on rank {fault.rank}{norms}"
    if fault.what == "loss":
        where = f"{fault.name} in round {fault.round + 1} of the proof"
        return f"a loss of {fault.got:.6g} for {where}, {fault.wanted:.6g} in one process"
    times = "" if fault.factor is None else f"{fault.factor:.4g} times that of one process, "
    far = f"{times}relative error {_far(fault.distance)} on rank {fault.rank} (tolerance {_far(fault.limit)})"
    kind = "the gradient of" if fault.what == "gradient" else "the buffer"
    return f"{kind} {fault.name} in round {fault.round + 1} of the proof, {far}"


def _with(verdict: ProofVerdict, first: Fault, others: int) -> str:
    """Return what to append to the first fault: its differing entries, or those of the first gradient, and the number
    of other faults.
    """
    if verdict.entries is None:
        return _and(others, first.what)
    fault, said = verdict.entries.fault, verdict.entries.said
    if fault is first:
        return f"; {said}" + (f"; and {_more(others, first.what)}" if others else "")
    of = f"of the gradient of {fault.name} in round {fault.round + 1}, on rank {fault.rank}, "
    return f"{_and(others, first.what)}; {of}{said}"


def _value(parting: Parting) -> str:
    spot = parting.spot
    which = f"output {spot.place} of {spot.call}" if spot.place else f"the output of {spot.call}"
    where = f"as stage {spot.into} receives it" if spot.into >= 0 else f"on rank {parting.rank}"
    values = "equal root mean square, other elements"
    if parting.got != parting.wanted:
        values = f"{parting.got}, {parting.wanted} in one process"
    return f"a different value of {which}, {where} ({values}; micro-batch {spot.key} in round {spot.round + 1})"


def _cause(verdict: ProofVerdict, first: Fault) -> str:
    kinds = {f.what for f in verdict.faults if f.round == first.round}
    if first.what == "initial value":
        return "The constructor computes it from parameters of another stage, or ranks build different models"
    if first.what == "loss":
        return (
            "The outputs of all units are equal: the code after the units, or the loss function, computes differently"
        )
    if "loss" in kinds:
        return "The losses differ too: the forward computes with other values"
    if first.what == "buffer":
        return "The losses and gradients are equal"
    if first.what == "gradient":
        return "The losses are equal: only the backward differs"
    return "The gradients are equal"


def _and(others: int, what: str) -> str:
    return f", and {_more(others, what)}" if others > 0 else ""


def _more(others: int, what: str) -> str:
    """Return how many further faults of the kind `what` there are, in words."""
    return f"{others} more {what}{'' if others == 1 else 'es' if what == 'loss' else 's'}"


def _far(distance: float) -> str:
    return "0" if distance == 0 else f"{distance:.0e}".replace("e-0", "e-").replace("e+0", "e+")
