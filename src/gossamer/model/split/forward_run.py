"""State of one forward of a stage while it runs, and the errors for a forward that goes another way than the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.model.split.dataflow import CallOutput, DataFlow, UnitCall
from gossamer.model.split.split_error import split_error
from gossamer.model.split.split_points import StageSpec
from gossamer.spec.errors import BadInput


@dataclass(slots=True)
class ForwardRun:
    """The state of one forward of a stage while it runs: the stage `part` of the data flow `flow`."""

    flow: DataFlow
    part: StageSpec
    given: dict[CallOutput, Tensor]  # outputs of placeholders: views of the received tensors
    made: dict[CallOutput, Tensor] = field(default_factory=dict)
    hooks: dict[CallOutput, frozenset[int]] = field(default_factory=dict)  # set by the unit on its outputs
    at: int = 0  # number of the next call
    inside: UnitCall | None = None  # the owned call that is running
    turns: dict[str, int] = field(default_factory=dict)  # of inner modules, in that call
    is_shadow: bool = False  # the call that is running is another stage's
    is_begun: bool = False  # the forward ended within such a call
    is_cut_short: bool = False  # the forward ended early

    def may_skip(self, until: int) -> bool:
        """Return whether calls may be left out in this forward: only this stage depends on them."""
        left_out = range(self.at, until)
        return all(map(self.part.owns, left_out)) and not any(value.call in left_out for value in self.part.sends)

    def strayed(self, came: str) -> BadInput:
        """Return the error for `came`, a unit or the end of the forward, in place of the next call."""
        wanted = self.flow.calls[self.at].name if self.at < self.flow.end else "the end of the forward"
        return split_error(
            wanted=f"{wanted} to come next in the forward on stage {self.part.stage}, as in the traced forward",
            got=came,
            do=lambda say: (
                "a split model calls the same units in the same order in every forward: move the decision "
                f"into a unit, or {say.whole}"
            ),
        )

    def origin(self, place: int) -> str:
        """Return a description of the tensor at `place` of the running call."""
        call = self.flow.calls[self.at]
        if len(call.leaves) == 1 or place >= len(call.leaves):
            return f"the output of {call.name}" if place < len(call.leaves) else f"a tensor that {call.name} stores"
        return f"output {place} of {call.name}"

    def differing(self, call: UnitCall, place: int, came: Any, wanted: str) -> BadInput:
        """Return the error for `came`, in place of what the call gave in the trace."""
        which = f" as its output {place}" if place >= 0 and len(call.leaves) > 1 else ""
        got = f"a tensor {tuple(came.shape)}" if isinstance(came, Tensor) else came if place < 0 else repr(came)
        return split_error(
            wanted=f"{call.name} to produce {wanted}{which} on stage {self.part.stage}, as in the traced forward",
            got=str(got),
            do=lambda say: (
                f"produce the same kind of value every time, or set {say.cuts} so that one stage has "
                f"{call.name} and its readers"
            ),
        )

    def check_structure(self, call: UnitCall, leaves: Sequence[Any]) -> None:
        """Raise BadInput unless the call gave as many leaves as in the trace."""
        if len(leaves) != len(call.leaves):
            raise self.differing(
                call, -1, f"{len(leaves)} tensors and values", f"{len(call.leaves)} tensors and values"
            )
