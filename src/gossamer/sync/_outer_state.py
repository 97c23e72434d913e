"""The state that the outer loop saves and restores, after all pending exchanges; the anchor is saved by itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from gossamer.sync._fragments import Fragment
from gossamer.sync._replica_parameters import ReplicaParameters


def shared_state(fragments: Sequence[Fragment], numbers: Collection[str]) -> dict[str, Tensor]:
    """Return the state equal on all ranks: outer-optimizer states, counters, pending mean.

    `numbers`: the outer optimizer's states that are single numbers.
    """
    found: dict[str, Tensor] = {}
    for index, fragment in enumerate(fragments):
        found.update(fragment.shared(index, numbers))
    return found


def own_state(local: ReplicaParameters) -> dict[str, Tensor]:
    """Return the state of this rank alone: its parameters and the state of its exchanges."""
    found = {f"at/{name}": local.truth[name] for name in local.common()}
    for index, fragment in enumerate(local.fragments):
        found.update(fragment.own(index))
    return found


def restore_state(
    local: ReplicaParameters, numbers: Collection[str], shared: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    """Restore the tensors of `shared_state` and `own_state`; of the second, some may be missing."""
    for index, fragment in enumerate(local.fragments):
        fragment.restore(index, numbers, shared, own)
    for part in local.parts():
        for name, view in part.views(part.anchor):
            local.set(name, own.get(f"at/{name}", view))
        if part.was.numel():
            for name, view in part.views(part.was):
                view.copy_(local.truth[name])
