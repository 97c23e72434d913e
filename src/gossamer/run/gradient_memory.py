"""Memory of gradients that a rank shares with its update process, a place for each group of parameters.

It has as many addresses as there are gradients, but a page only where a gradient is: `free` gives its pages back to the
system in both processes, and the next gradient there begins with zeros.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sharding import TierLayout
from gossamer.spec.errors import bad_input
from gossamer.store.tier_file import paged

_REMOVE = 9  # MADV_REMOVE of Linux, which some builds of Python leave out


@dataclass(frozen=True, slots=True)
class GradientMemory:
    """One end of the memory. The process that has its `descriptor` and the layout sees the same gradients."""

    descriptor: int
    layout: TierLayout
    starts: tuple[int, ...]
    _pages: mmap.mmap
    _bytes: Tensor

    @staticmethod
    def new(layout: TierLayout) -> GradientMemory:
        """Return memory without a page. Raises BadInput where the system has none such."""
        if not sys.platform.startswith("linux"):
            raise bad_input(
                wanted="Linux for an update process, to which gradients go through shared memory",
                got=sys.platform,
                do="set update to threads",
                key="plan.sharding.tiers.update",
            )
        descriptor = os.memfd_create("gossamer-gradients")
        os.ftruncate(descriptor, _starts(layout)[-1])
        return GradientMemory.at(descriptor, layout)

    @staticmethod
    def at(descriptor: int, layout: TierLayout) -> GradientMemory:
        """Return the memory that another process has made. Raises ValueError where it is shorter."""
        starts = _starts(layout)
        pages = mmap.mmap(descriptor, starts[-1])
        return GradientMemory(descriptor, layout, starts, pages, torch.frombuffer(pages, dtype=torch.uint8))

    def gradient(self, index: int) -> Tensor:
        """Return the whole gradient of a group, (numel,)."""
        return self._part(index, self.layout.groups[index].open_bytes)

    def own(self, index: int) -> Tensor:
        """Return the gradient of the parameters that are updated, (numel,): the start of the whole one's memory."""
        return self._part(index, self.layout.groups[index].gradient_bytes)

    def _part(self, index: int, count: int) -> Tensor:
        start = self.starts[index]
        return self._bytes[start : start + count].view(self.layout.groups[index].dtype)

    def free(self, index: int) -> None:
        """Give the pages of a gradient back."""
        if size := paged(self.layout.groups[index].open_bytes):
            self._pages.madvise(_REMOVE, self.starts[index], size)

    def close(self) -> None:
        """Close the descriptor. What is in use stays usable."""
        os.close(self.descriptor)


def _starts(layout: TierLayout) -> tuple[int, ...]:
    """Return where each group's gradient begins, in bytes, and where the last one ends."""
    starts = [0]
    for group in layout.groups:
        starts.append(starts[-1] + paged(group.open_bytes))
    return (*starts[:-1], max(starts[-1], paged(1)))
