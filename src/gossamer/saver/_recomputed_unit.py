"""The forward of a unit that keeps its arguments alone, and runs again in the backward.

torch's non-reentrant checkpointing drops what autograd saves and runs the unit again when the first of it is asked for.
Around it, this module sees to it that the second run is the first one: the arguments must not have been written to,
buffers that the first run wrote (running means) start from their values before it and are not written twice, and so
does Python state where the unit's code can change some. Random numbers are those of the first run, as the unit's
seeding lies inside (`model/unit_seeds.py`), and the precision is torch's to restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gossamer.model.snapshot import Snapshot
from gossamer.model.split.later_effects import changes_python
from gossamer.model.split.recompute import BufferValues, InPlaceWrites, copy_buffers, in_place_of, once, once_more
from gossamer.model.unit_forward import UnitForward
from gossamer.spec.errors import BadInput, bad_input


class RecomputedUnit(UnitForward):
    """The forward of unit `name`. `is_outline`: on shapes alone, where there are no values to see to."""

    def __init__(self, unit: nn.Module, name: str, *, is_outline: bool) -> None:
        self.name, self._is_outline = name, is_outline
        self._changes_python = not is_outline and changes_python(unit)
        self._written: frozenset[str] | None = None  # buffers that the first forward wrote
        self._writes = InPlaceWrites()
        super().__init__(unit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self.unit.training:
            return self.real(*args, **kwargs)
        run: _TwoRuns | _Plain = _Plain(self, args, kwargs) if self._is_outline else _TwoRuns(self, args, kwargs)
        # No arguments of its own: what encloses the unit must not save them in another form than they have.
        return checkpoint(run, use_reentrant=False, preserve_rng_state=False)

    def first(self, args: Any, kwargs: Any) -> tuple[Any, BufferValues, Snapshot | None]:
        """Run the unit; return its output, and the buffers and Python state from before that the run changed."""
        unit = self.unit
        python = Snapshot.of_python(unit, "", (args, kwargs)) if self._changes_python else None
        if self._written is None:
            before = {name: (tensor, tensor._version, tensor.clone()) for name, tensor in unit.named_buffers()}
            looked = python or Snapshot.of_python(unit, "", (args, kwargs))
            output, copies = self._writes.run(lambda: self.real(*args, **kwargs), unit, looked)
            self._written = _written(unit, before)
            kept = {id(space[key]) for space, key, _ in copy_buffers(unit, self._written, self._writes.names or ())}
            return output, [one for one in copies if id(one[0][one[1]]) in kept], python
        copies = copy_buffers(unit, self._written, self._writes.names or ())
        copied = {id(space[key]) for space, key, _ in copies}
        others = {n: t for n, t in (*unit.named_buffers(), *unit.named_parameters()) if id(t) not in copied}
        versions = {name: tensor._version for name, tensor in others.items()}
        if python is None:
            output = self.real(*args, **kwargs)
        else:
            with once(unit, python, copies):
                output = self.real(*args, **kwargs)
        for name, tensor in others.items():
            if tensor._version != versions[name]:
                raise self.refused(f"{name}, to which it did not write in its first forward")
        return output, copies, python

    def again(self, args: Any, kwargs: Any, buffers: BufferValues, python: Snapshot | None) -> Any:
        """Run the unit once more, without a trace of it."""
        if python is not None:
            return once_more(lambda: self.real(*args, **kwargs), self.unit, buffers, python)
        with in_place_of(buffers):
            return self.real(*args, **kwargs)

    def refused(self, what: str) -> BadInput:
        """Return the error about something that the unit writes in place."""
        return bad_input(
            wanted=f"a unit that recompute can run twice: {self.name} must not write in place to {what}",
            got="an in-place write",
            do="leave recompute out of plan.savers, name other units in it ({recompute: {units: [...]}}), or write the "
            "result to a new tensor",
            key="plan.savers",
        )


class _Plain:
    """The run of a unit on shapes alone."""

    def __init__(self, unit: RecomputedUnit, args: Any, kwargs: Any) -> None:
        self._unit, self._args, self._kwargs = unit, args, kwargs

    def __call__(self) -> Any:
        return self._unit.real(*self._args, **self._kwargs)


class _TwoRuns:
    """The two runs of a unit on the same arguments: one in the forward, one in the backward."""

    def __init__(self, unit: RecomputedUnit, args: Any, kwargs: Any) -> None:
        self._unit, self._args, self._kwargs = unit, args, kwargs
        self._given: Sequence[Tensor] = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._versions = [x._version for x in self._given]
        self._before: tuple[BufferValues, Snapshot | None] | None = None

    def __call__(self) -> Any:
        if self._before is None:
            output, buffers, python = self._unit.first(self._args, self._kwargs)
            self._before = buffers, python
            self._check("one of its arguments")
            return output
        self._check("one of its arguments, nor may other code after it")
        return self._unit.again(self._args, self._kwargs, *self._before)

    def _check(self, what: str) -> None:
        if any(x._version != version for x, version in zip(self._given, self._versions, strict=True)):
            raise self._unit.refused(what)


def _written(unit: nn.Module, before: Mapping[str, tuple[Tensor, int, Tensor]]) -> frozenset[str]:
    """Return the names of the buffers that a forward wrote, given what they were: the tensor, its version, its values.

    Norms of torch write their running means without a new version.
    """
    now = dict(unit.named_buffers())
    norms = {f"{path}.{name}" if path else name for path, m in unit.named_modules() if isinstance(m, _NormBase)
             for name in m._buffers}  # fmt: skip
    return frozenset(
        name
        for name, (tensor, version, was) in before.items()
        if name in norms or now.get(name) is not tensor or tensor._version != version or not torch.equal(tensor, was)
    )
