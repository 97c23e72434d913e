"""Split points of a model, and what every pipeline stage then owns, receives and sends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import nn

from gossamer.model.split.boundary_hooks import check_around
from gossamer.model.split.buffer_owners import Keepers, check_readers, keepers_of
from gossamer.model.split.dataflow import FIRST, HIDDEN, TOLD, CallOutput, DataFlow, LateWrite, UnitCall
from gossamer.model.split.output_leaf import OpaqueLeaf
from gossamer.model.split.split_error import SplitArguments, SplitError, split_error
from gossamer.spec.suggest import nearest

_FLOP_PER_BYTE = (
    10.0  # multiplied in the time that a byte of memory takes, on machines of all kinds, within a few times
)


@dataclass(frozen=True, slots=True)
class SplitPoints:
    """The first unit of every stage, in the order of the forward: `("embed", "blocks.2", "head")` are three stages.

    A unit that is called again is named with @ and the number of earlier calls: "shared@2". The name of a module that
    holds units stands for the first of them to be called.
    """

    first: tuple[str, ...]

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A specification of one stage of a split model, for one kind of batch. Tensors are in the order of sending."""

    stage: int
    stages: int
    low: int  # first call
    high: int  # one past the last
    receives: tuple[CallOutput, ...]
    sends: tuple[CallOutput, ...]
    holds: frozenset[str]  # parameters and buffers, canonical names
    shared: frozenset[str] = frozenset()  # held parameters that other stages hold too

    @property
    def is_last(self) -> bool:
        """Return whether this is the last stage."""
        return self.stage + 1 == self.stages

    def owns(self, call: int) -> bool:
        """Return whether unit call number `call` runs on this stage."""
        return self.low <= call < self.high


def balanced_split(flow: DataFlow, stages: int, *, costs: Mapping[str, float] | None = None) -> SplitPoints:
    """Return the split into `stages` contiguous runs of calls that minimizes the cost of the most expensive run.

    `costs`: cost of one call of each unit. Default: the flop of the call, plus 10 for every byte of parameters that it
    reads. So an embedding, which multiplies nothing, has a cost too. With few tokens the parameters dominate, as on
    real machines. Raises BadInput if there are fewer unit calls than stages.
    """
    _check_count(flow, stages)
    price = [work_of(call) if costs is None else costs.get(call.unit, 0.0) for call in flow.calls]
    return SplitPoints(tuple(flow.calls[i].name for i in _balanced(price, stages)))


def work_of(call: UnitCall) -> float:
    """Return the work of a call's forward, in flop: what a split balances where nothing is measured."""
    return call.flop + _FLOP_PER_BYTE * call.parameter_bytes


def stage_specs(
    module: nn.Module, flow: DataFlow, cuts: SplitPoints, keepers: Keepers | None = None
) -> tuple[StageSpec, ...]:
    """Return the specification of every stage; raise BadInput, naming the tensor, if the model cannot be split there.

    `keepers`: owner stages of the buffers, from another data flow, if this one is of a forward that changes none (an
    evaluation).
    """
    starts = _starts(module, flow, cuts)
    bounds = [*starts, flow.end]
    if flow.slope and len(starts) > 1:
        raise split_error(
            wanted="gradients that are taken in the forward to be taken within a unit",
            got=f"one through {flow.slope}, taken between units",
            do=lambda say: say.units_or("name the module that takes the gradient as one unit", say.whole),
        )
    edges = [_edges(flow, low) for low in bounds]
    keepers = keepers if keepers is not None else keepers_of(flow, bounds, edges)
    parts = tuple(
        StageSpec(
            stage=stage,
            stages=len(starts),
            low=low,
            high=high,
            receives=edges[stage],
            sends=edges[stage + 1] if high < flow.end else (),
            holds=(_holds(module, flow, low, high) - keepers.keys()) | {n for n in keepers if stage in keepers[n]},
        )
        for stage, (low, high) in enumerate(pairwise(bounds))
    )
    for part in parts:
        _check(flow, part)
    check_readers(flow, bounds, keepers)
    called: dict[str, set[int]] = {}
    for part in parts:
        for call in flow.calls[part.low : part.high]:
            called.setdefault(call.unit, set()).add(part.stage)
    check_around(module, called)
    shared = shared_names(parts, module).keys()
    return tuple(replace(part, shared=part.holds & shared) for part in parts)


def shared_names(parts: Sequence[StageSpec], module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the parameters held by several stages, whose gradients are to be summed, and these stages."""
    found = {name: tuple(p.stage for p in parts if name in p.holds) for name, _ in module.named_parameters()}
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map every name of every parameter and buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _edges(flow: DataFlow, at: int) -> tuple[CallOutput, ...]:
    """Return the tensors made before call `at` that it or later ones depend on."""
    told = [CallOutput(i, TOLD) for i, call in enumerate(flow.calls[:at]) if call.is_told and at < flow.end]
    return tuple(sorted([*told, *(v for v in flow.readers if v.call < at <= flow.last_reader(v))]))


def _holds(module: nn.Module, flow: DataFlow, low: int, high: int) -> frozenset[str]:
    canonical = canonical_names(module)
    used = {call.unit for call in flow.calls}
    mine = {call.unit for call in flow.calls[low:high]}
    is_last = high == flow.end
    if is_last:
        mine |= set(flow.units) - used  # never called: the last stage keeps their parameters
    inside = {name for name in canonical if any(_is_in(name, unit) for unit in flow.units)}
    names = {canonical[name] for name in canonical if any(_is_in(name, unit) for unit in mine)}
    use = flow.parameters
    loose = {name for name, at in use.loose.items() if is_last or min(at) < high}
    lent = {name for name, at in use.lent.items() if any(low <= call < high for call in at)}
    parameters = {name for name, _ in module.named_parameters()}
    others = {canonical[n] for n in canonical if n not in inside}
    kept = {n for n in others if n not in parameters or (is_last and n not in use.loose and n not in use.lent)}
    return frozenset(names | loose | lent | kept)


def _is_in(name: str, unit: str) -> bool:
    return not unit or name.startswith(unit + ".")


def _starts(module: nn.Module, flow: DataFlow, cuts: SplitPoints) -> list[int]:
    _check_count(flow, cuts.stages)
    starts = [_number(module, flow, name) for name in cuts.first]
    if starts[:1] != [0]:
        raise split_error(
            wanted=f"the first stage to begin with {flow.calls[0].name}, which runs first",
            got=", ".join(cuts.first[:1]) or "no stage",
            do=lambda say: f"put {flow.calls[0].name} first in {say.cuts}",
        )
    if sorted(set(starts)) != starts:
        raise split_error(
            wanted="stages in the order of the forward",
            got=", ".join(cuts.first),
            do=lambda say: f"sort {say.cuts} in that order",
        )
    return starts


def _number(module: nn.Module, flow: DataFlow, name: str) -> int:
    if name in flow.names:
        return flow.names[name]
    inner = (number for number, call in enumerate(flow.calls) if call.unit.startswith(name + "."))
    if (first := next(inner, None)) is not None:
        return first  # a container stands for its first unit
    outer = next((unit for unit in flow.units if name.startswith(unit + ".")), None)
    if outer is not None and any(path == name for path, _ in module.named_modules()):
        times = sum(call.unit == outer for call in flow.calls)
        why = f", which is one module called {times} times" if times > 1 else ""
        raise split_error(
            wanted="a cut between units",
            got=f"{name}, inside {outer}{why}",
            do=f"cut before {outer}",
        )
    if name in flow.units:
        raise split_error(
            wanted="a unit that the forward calls",
            got=f"{name}, which the forward never calls",
            do=lambda say: f"name another unit than {name} in {say.cuts}",
        )
    raise SplitError(f"there is no unit {name!r}", lambda _: nearest(name, flow.names))


def _check_count(flow: DataFlow, stages: int) -> None:
    if stages <= len(flow.calls) and (stages == 1 or flow.units != ("",)):
        return
    if len(flow.calls) <= 1:
        raise split_error(
            wanted=f"a model that can be split into {stages} stages",
            got="one without repeated blocks, lists of modules or children that own parameters",
            do=lambda say: say.units_or("name the modules to cut between", "use fewer stages"),
        )
    raise split_error(
        wanted=f"at least {stages} units for {stages} stages",
        got=f"{len(flow.calls)}: {', '.join(call.name for call in flow.calls[:6])}" + _never_called(flow),
        do=lambda say: say.units_or(
            "name smaller modules that the forward calls, to split the model between them",
            f"use {len(flow.calls)} stages at most",
        ),
    )


def _never_called(flow: DataFlow) -> str:
    called = {call.unit for call in flow.calls}
    never = [unit for unit in flow.units if unit not in called]
    return f"; {', '.join(never[:6])} own parameters and are never called" if never else ""


def _check(flow: DataFlow, part: StageSpec) -> None:
    """Raise BadInput if this stage would compute with an absent tensor."""
    for call in flow.calls[: part.low]:
        strange = next((leaf.kind for leaf in call.leaves if isinstance(leaf, OpaqueLeaf)), "")
        if strange and any(v.place == HIDDEN for v in part.receives):
            raise split_error(
                wanted=f"{call.name} to return tensors, in tuples, lists, dicts or dataclasses",
                got=f"a {strange}",
                do=lambda say: (
                    f"return its tensors, or have no split point before {flow.calls[part.low].name} ({say.cuts})"
                ),
            )
    for value in part.receives:
        if value.place == HIDDEN:
            readers = sorted(flow.readers[value])
            raise split_error(
                wanted=f"{flow.calls[value.call].name} to return, or keep as an attribute, every tensor that is read "
                "elsewhere",
                got=f"a tensor made in {flow.calls[value.call].name}, which {_reader(flow, readers[-1])} reads",
                do=lambda say: (
                    f"return that tensor, or set {say.cuts} without a split point between the two (this one "
                    f"is before {flow.calls[part.low].name})"
                ),
            )
    for value in flow.nodes.intersection(part.receives):
        raise SplitError(
            f"code between units reads the grad_fn of an output of {flow.calls[value.call].name}, which stage "
            f"{part.stage} receives from another rank without its graph",
            lambda say: (
                "call register_hook on the tensor, register the hook inside the unit, or move the split point "
                f"({say.cuts})"
            ),
        )
    for number, call in enumerate(flow.calls[: part.low]):
        for places in call.overlaps:
            if sum(CallOutput(number, place) in part.receives for place in places) > 1:
                raise split_error(
                    wanted=f"{call.name} to return tensors that share no memory, or that are not written in place",
                    got=f"outputs {', '.join(map(str, places))}, which share memory, and a write to one of them",
                    do=partial(_one_reader, call.name),
                )
    for value, positions in flow.branches.items():
        late = [p for p in positions if p < part.high or part.is_last]
        if late and value.call < part.low and value not in part.receives:
            name = flow.calls[value.call].name
            raise split_error(
                wanted=f"no data-dependent branch on the output of {name} in code that every stage runs",
                got=f"one (or an .item()) before {_reader(flow, late[0])}, and stage {part.stage} does not receive it",
                do=partial(_branch, name),
            )

    check_late(flow, part, end_of(flow, part), [one for one in flow.state.late if one.after != FIRST])


def end_of(flow: DataFlow, part: StageSpec) -> float:
    """Return the position where the forward of a stage ends, for lack of a tensor value read there; inf if nowhere.

    Positions are those of `LateWrite`.
    """
    ends = [p - 0.5 for v, at in flow.branches.items() for p in at if p >= part.high and not _has(part, v)]
    ends += [float(i) for i in range(part.high, flow.end) if flow.calls[i].is_told]
    return math.inf if part.is_last else min(ends, default=math.inf)


def check_late(flow: DataFlow, part: StageSpec, end: float, lates: Sequence[LateWrite]) -> None:
    """Raise BadInput if the forward ends at `end`, and the next one needs Python state that the rest would change."""
    late = next((one for one in lates if one.matters(end) and _stays(flow, one, end)), None)
    if late is not None:
        raise split_error(
            wanted=f"the update of {late.name}, which the next forward reads, before any read (.item(), bool()) of a "
            f"tensor that stage {part.stage} does not have (its last unit is {flow.calls[part.high - 1].name})",
            got=f"such a read before {_reader(flow, math.ceil(end))}, where the forward of that stage has to end",
            do=lambda say: (
                f"move the read behind the update, use tensors instead of Python numbers, or set {say.cuts} so "
                "that the stage has the tensor"
            ),
        )


def _one_reader(name: str, say: SplitArguments) -> str:
    return f"return a copy (.clone()), or set {say.cuts} so that one stage has {name} and all readers"


def _branch(name: str, say: SplitArguments) -> str:
    return f"move the branch into a unit, or put the last split point right behind {name} ({say.cuts})"


def _has(part: StageSpec, value: CallOutput) -> bool:
    return part.owns(value.call) or value in part.receives


def _stays(flow: DataFlow, late: LateWrite, end: float) -> bool:
    """Return whether the state changed after `end` lasts to the next forward.

    A reader right before the end can only pass it on by a change that lasts: of a tensor, or of state that is read
    earlier.
    """
    if late.after == FIRST or min(late.readers) < end or end in flow.state.stirs:
        return True
    stirred = (one for one in flow.state.stirred if one.after == end and one.written >= end)
    return any(reader < end for one in stirred for reader in one.readers)


def _reader(flow: DataFlow, position: int) -> str:
    return flow.calls[position].name if position < flow.end else "the end of the forward"


def _balanced(price: Sequence[float], stages: int) -> list[int]:
    """Return where each of `stages` non-empty runs begins, their largest sum minimal; ties: earlier stages get more."""
    count = len(price)
    total = [0.0]
    for p in price:
        total.append(total[-1] + p)
    best = {(1, i): (total[i], 0) for i in range(1, count + 1)}
    for k in range(2, stages + 1):
        for i in range(k, count + 1):
            best[k, i] = min(((max(best[k - 1, j][0], total[i] - total[j])), -j) for j in range(k - 1, i))
            best[k, i] = (best[k, i][0], -best[k, i][1])
    starts, at = [], count
    for k in range(stages, 0, -1):
        at = best[k, at][1] if k > 1 else 0
        starts.append(at)
    return starts[::-1]
