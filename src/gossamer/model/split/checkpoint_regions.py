"""Checkpointed regions of the model's own code (torch.utils.checkpoint, not reentrant) around calls of units.

torch runs such a region once more in the backward. What was a ghost in the forward is one then: it gives what it gave.
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
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class PlaceholderRegion:
    """What a unit of another stage gave. `versions`: how often each of its tensors had been written to."""

    output: Any
    versions: tuple[int, ...]
    is_shadow: bool  # it was run, for what it does in Python

    def again(self, unit: str) -> Any:
        """The same once more; raises BadInput where it is not there any more."""
        if self.is_shadow or self.versions != _versions(self.output):
            what = "something in Python that others may read" if self.is_shadow else "a tensor that is changed in place"
            raise bad_input(
                wanted=f"{unit}, which the model's code calls in a checkpointed region, to give tensors alone that "
                "nobody changes, for stages behind it run the region again",
                got=what,
                do="checkpoint within the unit, or cut so that one stage has all of the region",
                key="plan.mesh.pipe",
            )
        return self.output


@dataclass(slots=True)
class CheckpointRegions:
    """Of one stage."""

    _calls: weakref.WeakKeyDictionary[Any, list[PlaceholderRegion | None]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _run: Any = None  # of a region that is under way in a backward
    _at: int = 0  # number of its next call

    def note(self, output: Any, *, is_own: bool, is_shadow: bool) -> None:
        """A forward has called a unit."""
        frame, _ = _region()
        if frame is not None:
            ghostly = None if is_own else PlaceholderRegion(output, _versions(output), is_shadow)
            self._calls.setdefault(frame, []).append(ghostly)

    def next(self) -> PlaceholderRegion | None:
        """A backward calls a unit: what it was in the forward; None where it is to run itself."""
        frame, run = _region()
        calls = self._calls.get(frame) if frame is not None else None
        if calls is None:
            return None  # a region within a unit
        if run is not self._run:
            self._run, self._at = run, 0
        self._at += 1
        return calls[self._at - 1] if self._at <= len(calls) else None

    def is_run_again(self) -> bool:
        """Whether a backward runs a region with units in it, and none of them just now."""
        frame, _ = _region()
        return frame is not None and frame in self._calls


def _region() -> tuple[Any, Any]:
    """What torch knows the innermost region by that is running, and what this run of it is known by."""
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
