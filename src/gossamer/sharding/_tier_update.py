"""The update of groups whose weights and states lie in a file: while one is updated the next is read and the last is
written.

Three threads pass windows of memory on: read, update, write. What is read is the record that counts, what is written
the other one, so nothing that counts is overwritten. A group's gradient is in memory as backward leaves it (its update
then runs while backward goes on), or in the file where the update must wait for what is known after backward.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer
from gossamer.sharding._group_updater import GroupUpdater, UpdateProgress, UpdateTerms
from gossamer.sharding._tier_layout import TierGroup, TierLayout
from gossamer.sharding._tier_limits import TierAccount
from gossamer.store.tier_file import TierFile, as_bytes, page_buffer, paged

_DEAD_S = 10.0  # after an error: a thread may be in a request to a disk that does not answer


class UpdateListener(ABC):
    """Whom the threads tell what they have done, each from its own."""

    @abstractmethod
    def freed(self, index: int) -> None:
        """The gradient of a group is no longer read."""

    @abstractmethod
    def done(self, index: int) -> None:
        """What was submitted of a group is done."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """A thread has ended with an error."""


@dataclass(frozen=True, slots=True)
class HostListener(UpdateListener):
    """Gives gradients back to the account of the rank in whose threads the updates are."""

    layout: TierLayout
    host: TierAccount

    def freed(self, index: int) -> None:
        self.host.give(self.layout.groups[index].open_bytes)

    def done(self, index: int) -> None:
        """Do nothing: progress is counted in the same process."""

    def failed(self, error: BaseException) -> None:
        """Do nothing: the rank finds the error in the progress."""


@dataclass(slots=True)
class _Job:
    index: int
    group: TierGroup
    record: int  # the one that counts
    gradient: Tensor | None  # (numel,) of the group's type; None: it is in the file
    idle: frozenset[str]
    terms: UpdateTerms
    window: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class _Ended(Exception):
    """Another thread has failed."""


@dataclass(slots=True)
class TierUpdater(GroupUpdater):
    """The threads that update groups in a file. `windows`: buffers of one record each, which the caller accounts."""

    rule: Optimizer
    layout: TierLayout
    file: TierFile
    windows: int
    listener: UpdateListener
    progress: UpdateProgress = field(default_factory=UpdateProgress)
    _free: queue.SimpleQueue[Tensor | None] = field(default_factory=queue.SimpleQueue)
    _to_read: queue.SimpleQueue[_Job | Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _to_update: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _to_write: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Allocate the windows and start the threads."""
        for _ in range(self.windows):
            self._free.put(page_buffer(self.layout.window_bytes))
        for name, work in (("read", self._reads), ("update", self._updates), ("write", self._writes)):
            thread = threading.Thread(target=work, name=f"gossamer-tier-{name}s", daemon=True)
            thread.start()
            self._threads.append(thread)

    def gradient(self, index: int) -> Tensor:
        group = self.layout.groups[index]
        dtype = group.dtype
        return torch.zeros(group.open_bytes // dtype.itemsize, dtype=dtype)

    def submit(
        self, index: int, record: int, gradient: Tensor | None, idle: frozenset[str], terms: UpdateTerms
    ) -> None:
        self.progress.submitted()
        self._to_read.put(_Job(index, self.layout.groups[index], record, gradient, idle, terms))

    def keep(self, index: int, gradient: Tensor) -> None:
        self.progress.submitted()
        self._to_read.put(lambda: self._kept(index, gradient))

    def _kept(self, index: int, gradient: Tensor) -> None:
        group, window = self.layout.groups[index], self._window()
        part = window[: paged(group.gradient_bytes)]
        part[: gradient.nbytes].copy_(as_bytes(gradient))
        self.file.write(group.gradient_start, part)
        self.progress.moved_bytes += len(part)
        self._free.put(window)
        self.listener.freed(index)
        self._done(index)

    def drop(self, index: int, gradient: Tensor) -> None:
        self.listener.freed(index)

    def close(self) -> None:
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(_DEAD_S if self.progress.has_failed else None)
        self._threads.clear()

    def _done(self, index: int) -> None:
        self.listener.done(index)
        self.progress.done()

    def _failed(self, error: BaseException) -> None:
        """Keep the error, and let the threads end: they pass their ends on, and no window comes back any more."""
        if not isinstance(error, _Ended):
            self.progress.failed(error)
            self.listener.failed(error)
        self._free.put(None)
        self._to_read.put(None)

    def _window(self) -> Tensor:
        """Return a window once there is one. Raises _Ended where a thread has failed."""
        if (window := self._free.get()) is None:
            raise _Ended
        return window

    def _reads(self) -> None:
        try:
            while (job := self._to_read.get()) is not None:
                if not isinstance(job, _Job):
                    job()
                    continue
                group, job.window = job.group, self._window()
                self.file.read(group.starts[job.record], job.window[: group.record_bytes])
                self.progress.moved_bytes += group.record_bytes
                if job.gradient is None:
                    end = group.record_bytes + paged(group.gradient_bytes)
                    self.file.read(group.gradient_start, job.window[group.record_bytes : end])
                    self.progress.moved_bytes += end - group.record_bytes
                self._to_update.put(job)
        except BaseException as error:
            self._failed(error)
        self._to_update.put(None)

    def _updates(self) -> None:
        try:
            while (job := self._to_update.get()) is not None:
                began = time.thread_time()
                self._update(job)
                self.progress.busy_s += time.thread_time() - began
                if job.gradient is not None:
                    job.gradient = None
                    self.listener.freed(job.index)
                self._to_write.put(job)
        except BaseException as error:
            self._failed(error)
        self._to_write.put(None)

    @torch.no_grad()
    def _update(self, job: _Job) -> None:
        group, terms = job.group, job.terms
        weights, states = group.views(job.window)
        flat = job.gradient
        if flat is None:
            held = job.window[group.record_bytes : group.record_bytes + group.gradient_bytes]
            flat = held.view(group.dtype)
        if terms.scale != 1.0:
            flat.mul_(terms.scale)
        gradients, at = dict[str, Tensor](), 0
        for name in group.names:
            numel = weights[name].numel()
            gradients[name] = flat[at : at + numel].view(weights[name].shape)
            at += numel
        moved = [name for name in states if name not in job.idle and gradients[name].numel()]
        for skipped in sorted({terms.skipped.get(name, 0) for name in moved}):
            part = {name: gradients[name] for name in moved if terms.skipped.get(name, 0) == skipped}
            some = {name: weights[name] for name in part}
            self.rule.update(some, part, states, lr_scale=terms.lr_scale, step=terms.step - skipped)

    def _writes(self) -> None:
        try:
            while (job := self._to_write.get()) is not None:
                group = job.group
                self.file.write(group.starts[1 - job.record], job.window[: group.record_bytes])
                self.progress.moved_bytes += group.record_bytes
                self._free.put(job.window)
                self.progress.written.add(job.index)
                self._done(job.index)
        except BaseException as error:
            self._failed(error)
