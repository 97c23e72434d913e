"""Buffer owners: the stages in which a buffer that the forward changes equals that of a single-process run.

Every stage runs the model's own code up to its last unit, and so makes the buffer updates of that code. The result is
right only if the stage reaches the update and has the tensors that the new value is computed from. A buffer that a unit
changes is right on the stage that owns the unit. Only these stages hold the buffer; a read on another one raises
BadInput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gossamer.model.split.dataflow import BufferWrite, CallOutput, DataFlow
from gossamer.model.split.split_error import split_error

Keepers = Mapping[str, frozenset[int]]  # buffer -> stages


def keepers_of(flow: DataFlow, bounds: Sequence[int], receives: Sequence[Sequence[CallOutput]]) -> Keepers:
    """Return the owner stages of every buffer that the forward changes.

    `bounds`: stage s owns the calls from bounds[s] up to bounds[s + 1], exclusive. `receives`: tensors received by each
    stage. Raises BadInput if no stage has all that a buffer's new value needs.
    """
    found: dict[str, frozenset[int]] = {}
    for name, use in flow.buffers.items():
        if not use.changes:
            continue
        stages = range(len(bounds) - 1)
        right = (s for s in stages if all(_is_right(c, flow, bounds, s, receives[s]) for c in use.changes))
        found[name] = frozenset(right)
        if not found[name]:
            raise split_error(
                wanted=f"the buffer {name} to be changed in one stage",
                got=f"changes {_listed(flow, bounds, use.changes)}",
                do=lambda say: f"set {say.cuts} so that one stage has all these changes",
            )
    return found


def check_readers(flow: DataFlow, bounds: Sequence[int], keepers: Keepers) -> None:
    """Raise BadInput if a stage reads a buffer that is right on other stages only."""
    last = len(bounds) - 2
    for name, stages in keepers.items():
        use = flow.buffers.get(name)
        if use is None:
            continue
        read = {position: min(_stage(bounds, position), last) for position in use.readers}
        read |= {p: s for p in use.looks for s in range(last + 1) if p <= bounds[s + 1] and s not in stages}
        for position, stage in sorted(read.items()):
            if stage not in stages:
                raise split_error(
                    wanted=f"the buffer {name} to be read in the stage that changes it (stage {min(stages)})",
                    got=f"a read by {_named(flow, position)}, in stage {stage}",
                    do=lambda say: f"set {say.cuts} so that one stage has both the change and the read",
                )


def _is_right(
    change: BufferWrite, flow: DataFlow, bounds: Sequence[int], stage: int, receives: Sequence[CallOutput]
) -> bool:
    low, high = bounds[stage], bounds[stage + 1]
    if not change.loose:
        return low <= change.at < high
    is_reached = change.at <= high  # a stage ends where the next unit would be called
    return is_reached and all(value.call >= low or value in receives for value in change.values)


def _stage(bounds: Sequence[int], position: int) -> int:
    return sum(position >= bound for bound in bounds[1:])


def _listed(flow: DataFlow, bounds: Sequence[int], changes: frozenset[BufferWrite]) -> str:
    said = []
    for change in sorted(changes, key=lambda c: (c.at, c.loose)):
        who = _named(flow, change.at) if not change.loose else f"the model's code before {_named(flow, change.at)}"
        said.append(f"by {who} (stage {min(_stage(bounds, change.at), len(bounds) - 2)})")
    return ", ".join(dict.fromkeys(said))


def _named(flow: DataFlow, position: int) -> str:
    return flow.calls[position].name if position < flow.end else "the end of the forward"
