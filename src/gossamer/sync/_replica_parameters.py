"""The parameters of one rank in local-update training, and the way between them and the anchors of the fragments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sync._fragments import Fragment, FragmentBucket, PendingSync


@dataclass(frozen=True, slots=True)
class ReplicaParameters:
    """The parameters of one rank beside the global parameters (anchors), which `fragments` hold.

    `params`: the trained parameters by name; `truth`: by the same names the float32 master weights, which the optimizer
    updates in place of parameters in half types.
    """

    params: Mapping[str, Tensor]
    truth: Mapping[str, Tensor]
    fragments: Sequence[Fragment]

    def parts(self) -> Iterator[FragmentBucket]:
        """Yield the buckets of all fragments."""
        for fragment in self.fragments:
            yield from fragment.parts

    def common(self) -> dict[str, Tensor]:
        """Return the anchor (global parameters) by name, as views."""
        return {name: view for part in self.parts() for name, view in part.views(part.anchor)}

    @torch.no_grad()
    def anchor_here(self) -> None:
        """Set the anchor to this rank's parameters."""
        for part in self.parts():
            for name, view in part.views(part.anchor):
                view.copy_(self.truth[name])
            if part.was.numel():
                part.was.copy_(part.anchor)

    def pseudo_gradient(self, fragment: Fragment) -> list[Tensor]:
        """Return the pseudo-gradient of a fragment: the anchor minus this rank's parameters."""
        return [self._minus_own(part, part.anchor.clone()) for part in fragment.parts]

    def step_pseudo_gradient(self, part: FragmentBucket) -> Tensor:
        """Return the parameters before this step minus those after it."""
        return self._minus_own(part, part.was.clone())

    def _minus_own(self, part: FragmentBucket, flat: Tensor) -> Tensor:
        for name, view in part.views(flat):
            view.sub_(self.truth[name])
        return flat

    def moved_since(self, fragment: Fragment, flight: PendingSync) -> Sequence[Tensor]:
        """Return this rank's parameters minus those when `flight` was sent, one flat tensor (numel,) per bucket."""
        moved = []
        for part, left in zip(fragment.parts, flight.left, strict=True):
            flat = left.neg()
            for name, view in part.views(flat):
                view.add_(self.truth[name])
            moved.append(flat)
        return moved

    def take_over(
        self, fragment: Fragment, losses: Sequence[Tensor | None], mix: float, carried: Sequence[Tensor] = ()
    ) -> None:
        """Load the anchor, plus the local movement `carried`, mixed with the local parameters by `mix`.

        The compression error in `losses` stays in the island's parameters.
        """
        for index, (part, lost) in enumerate(zip(fragment.parts, losses, strict=True)):
            there = part.anchor if lost is None else part.anchor - lost
            there = there + carried[index] if carried else there
            for name, view in part.views(there):
                self.set(name, view if not mix else torch.lerp(view, self.truth[name], mix))
            if part.was.numel():
                part.was.copy_(there)

    def return_to(self, fragments: Sequence[Fragment]) -> None:
        """Load the anchors of these fragments alone."""
        for fragment in fragments:
            self.take_over(fragment, [None] * len(fragment.parts), 0.0)

    def follow(self, parts: Sequence[FragmentBucket]) -> None:
        """Load `was` into the parameters."""
        for part in parts:
            for name, view in part.views(part.was):
                self.set(name, view)

    def set(self, name: str, value: Tensor) -> None:
        """Set a parameter, and its master weights where they are apart."""
        self.truth[name].copy_(value)
        if self.params[name].data_ptr() != self.truth[name].data_ptr():
            self.params[name].copy_(value)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Load the anchor into the parameters inside the context; restore this island's own afterwards."""
        with torch.no_grad():
            own = {name: self.params[name].clone() for name in self.params}
            for part in self.parts():
                for name, view in part.views(part.anchor):
                    self.params[name].copy_(view)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in own.items():
                    self.params[name].copy_(tensor)
