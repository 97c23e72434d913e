"""Checkpointed regions (torch.utils.checkpoint, non-reentrant) of the model's own code around calls of units.

torch runs such a region again in the backward. A unit that was a placeholder in the forward is one again then: it
returns the same output.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.model.split.pytree import leaves_of
from gossamer.model.split.split_error import split_error


@dataclass(frozen=True, slots=True)
class PlaceholderRegion:
    """The output of another stage's unit in a checkpointed region. `versions`: write counters of its tensors."""

    output: Any
    versions: tuple[int, ...]
    is_shadow: bool  # its forward ran on absent tensors, for its Python effects

    def again(self, unit: str) -> Any:
        """Return the same output again.

        Raises BadInput if one of its tensors was written in place, or the unit ran as a shadow.
        """
        if self.is_shadow or self.versions != _versions(self.output):
            what = "Python state that other code may read" if self.is_shadow else "a tensor that is written in place"
            raise split_error(
                wanted=f"{unit}, which the model's code calls in a checkpointed region, to produce only tensors that "
                "are never written in place, as later stages recompute the region",
                got=what,
                do=lambda say: f"checkpoint within the unit, or set {say.cuts} so that one stage has all of the region",
            )
        return self.output


@dataclass(slots=True)
class CheckpointRegions:
    """The checkpointed regions of one stage, and the units that its forwards called in them."""

    _calls: weakref.WeakKeyDictionary[Any, list[PlaceholderRegion | None]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _run: Any = None  # the present run of a region in a backward
    _at: int = 0  # number of its next call

    def note(self, output: Any, *, is_own: bool, is_shadow: bool) -> None:
        """Record that a forward called a unit. `is_own`: this stage owns it; `is_shadow`: it ran on absent tensors."""
        frame, _ = _region()
        if frame is not None:
            ghostly = None if is_own else PlaceholderRegion(output, _versions(output), is_shadow)
            self._calls.setdefault(frame, []).append(ghostly)

    def next(self) -> PlaceholderRegion | None:
        """Return the placeholder of the next unit call in a region that a backward runs again; None: run the unit."""
        frame, run = _region()
        calls = self._calls.get(frame) if frame is not None else None
        if calls is None:
            return None  # a region within a unit
        if run is not self._run:
            self._run, self._at = run, 0
        self._at += 1
        return calls[self._at - 1] if self._at <= len(calls) else None

    def is_run_again(self) -> bool:
        """Return whether the checkpointed region that is running contains units. Call it in a backward only."""
        frame, _ = _region()
        return frame is not None and frame in self._calls


def _region() -> tuple[Any, Any]:
    """Return torch's key of the innermost region that is running, and a key of this run; None, None if none runs."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    pack: Callable[..., Any] | None = inspect.unwrap(hooks[0]) if hooks else None
    if pack is None or getattr(pack, "__module__", "") != "torch.utils.checkpoint":
        return None, None
    held = inspect.getclosurevars(pack).nonlocals
    if "frame" in held:
        return held["frame"], pack
    return (held["target_frame_ref"](), pack) if "target_frame_ref" in held else (None, None)


def _versions(output: Any) -> tuple[int, ...]:
    return tuple(x._version for x in leaves_of(output) if isinstance(x, Tensor))
