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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer
from gossamer.sharding._tier_layout import TierGroup, TierLayout
from gossamer.sharding._tier_limits import TierAccount
from gossamer.store.tier_file import TierFile, as_bytes, page_buffer, paged


@dataclass(frozen=True, slots=True)
class UpdateTerms:
    """What an update depends on beside gradients: factor on the rate, updates made before, factor on gradients."""

    lr_scale: float
    step: int
    scale: float = 1.0
    skipped: Mapping[str, int] = field(default_factory=dict)  # parameter -> updates of the run without its gradient


@dataclass(slots=True)
class _Job:
    group: TierGroup
    record: int  # the one that counts
    gradient: Tensor | None  # (numel,) of the group's type; None: it is in the file
    idle: frozenset[str]
    terms: UpdateTerms
    window: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


@dataclass(slots=True)
class TierUpdater:
    """The threads of a rank that update groups in a file. `windows`: buffers of one record each."""

    rule: Optimizer
    layout: TierLayout
    file: TierFile
    host: TierAccount
    windows: int
    busy_s: float = 0.0  # seconds that the update itself computed
    active_s: float = 0.0  # seconds in which anything was being read, updated or written
    moved_bytes: int = 0
    written: set[int] = field(default_factory=set)  # groups whose other record is written since `begin`
    _free: queue.SimpleQueue[Tensor] = field(default_factory=queue.SimpleQueue)
    _to_read: queue.SimpleQueue[_Job | Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _to_update: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _to_write: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    _open: int = 0
    _since: float = 0.0  # when the first of what is open was submitted
    idle_since: float = 0.0
    _idle: threading.Condition = field(default_factory=threading.Condition)
    _error: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Take the memory of the windows and start the threads."""
        for _ in range(self.windows):
            self.host.take(self.layout.window_bytes)
            self._free.put(page_buffer(self.layout.window_bytes))
        for name, work in (("read", self._reads), ("update", self._updates), ("write", self._writes)):
            thread = threading.Thread(target=work, name=f"gossamer-tier-{name}s", daemon=True)
            thread.start()
            self._threads.append(thread)

    def begin(self) -> None:
        """Begin a step: no group is updated yet."""
        self.wait()
        self.written.clear()

    def submit(
        self, group: TierGroup, record: int, gradient: Tensor | None, idle: frozenset[str], terms: UpdateTerms
    ) -> None:
        """Update a group beside what runs. Its gradient, if in memory, is given back to the account when it is done."""
        self._count(1)
        self._to_read.put(_Job(group, record, gradient, idle, terms))

    def keep(self, group: TierGroup, gradient: Tensor) -> None:
        """Write a gradient to the file, and give its memory back."""
        self._count(1)
        self._to_read.put(lambda: self._kept(group, gradient))

    def _kept(self, group: TierGroup, gradient: Tensor) -> None:
        window = self._free.get()
        part = window[: paged(group.gradient_bytes)]
        part[: gradient.nbytes].copy_(as_bytes(gradient))
        self.file.write(group.gradient_start, part)
        self.moved_bytes += len(part)
        self._free.put(window)
        self.host.give(group.gradient_bytes)
        self._count(-1)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way."""
        return self._open == 0

    def wait(self) -> None:
        """Wait until all that was submitted is done. Raises the error of a thread."""
        with self._idle:
            while self._open and self._error is None:
                self._idle.wait()
        self.check()

    def check(self) -> None:
        """Raise the error of a thread, if one has ended with it."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the threads, after what they have begun."""
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(None if self._error is None else 1.0)  # after an error some wait for windows for good
        self._threads.clear()

    def _count(self, more: int) -> None:
        with self._idle:
            now = time.perf_counter()
            self._since = now if not self._open else self._since
            self._open += more
            self.active_s += 0.0 if self._open else now - self._since
            self.idle_since = now
            self._idle.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._idle:
            self._error = error
            self._idle.notify_all()

    def _reads(self) -> None:
        try:
            while (job := self._to_read.get()) is not None:
                if not isinstance(job, _Job):
                    job()
                    continue
                group, job.window = job.group, self._free.get()
                self.file.read(group.starts[job.record], job.window[: group.record_bytes])
                self.moved_bytes += group.record_bytes
                if job.gradient is None:
                    end = group.record_bytes + paged(group.gradient_bytes)
                    self.file.read(group.gradient_start, job.window[group.record_bytes : end])
                    self.moved_bytes += end - group.record_bytes
                self._to_update.put(job)
        except BaseException as error:
            self._failed(error)
        self._to_update.put(None)

    def _updates(self) -> None:
        try:
            while (job := self._to_update.get()) is not None:
                began = time.thread_time()
                self._update(job)
                self.busy_s += time.thread_time() - began
                if job.gradient is not None:
                    job.gradient = None
                    self.host.give(job.group.gradient_bytes)
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
            flat = held.view(next(iter(weights.values())).dtype)
        if terms.scale != 1.0:
            flat.mul_(terms.scale)
        gradients, at = dict[str, Tensor](), 0
        for name in group.names:
            numel = weights[name].numel()
            gradients[name] = flat[at : at + numel].view(weights[name].shape)
            at += numel
        moved = [name for name in group.names if name not in job.idle]
        for skipped in sorted({terms.skipped.get(name, 0) for name in moved}):
            part = {name: gradients[name] for name in moved if terms.skipped.get(name, 0) == skipped}
            some = {name: weights[name] for name in part}
            self.rule.update(some, part, states, lr_scale=terms.lr_scale, step=terms.step - skipped)

    def _writes(self) -> None:
        try:
            while (job := self._to_write.get()) is not None:
                group = job.group
                self.file.write(group.starts[1 - job.record], job.window[: group.record_bytes])
                self.moved_bytes += group.record_bytes
                self._free.put(job.window)
                self.written.add(self.layout.groups.index(group))
                self._count(-1)
        except BaseException as error:
            self._failed(error)
