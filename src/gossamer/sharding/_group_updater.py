"""What updates groups whose weights and states lie in a file, beside what the rank computes: its interface."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class UpdateTerms:
    """What an update depends on beside gradients: factor on the rate, updates made before, factor on gradients."""

    lr_scale: float
    step: int
    scale: float = 1.0
    skipped: Mapping[str, int] = field(default_factory=dict)  # parameter -> updates of the run without its gradient


@dataclass(slots=True)
class UpdateProgress:
    """What has been submitted and done of a step. Any thread may count."""

    busy_s: float = 0.0  # seconds that the updates themselves computed
    active_s: float = 0.0  # seconds in which anything was being read, updated or written
    moved_bytes: int = 0
    written: set[int] = field(default_factory=set)  # groups whose other record is written since the step began
    idle_since: float = 0.0
    _open: int = 0
    _since: float = 0.0  # when the first of what is open was submitted
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _error: BaseException | None = None

    def submitted(self) -> None:
        """Count something that was submitted."""
        self._count(1)

    def done(self) -> None:
        """Count something that is done."""
        self._count(-1)

    def _count(self, more: int) -> None:
        with self._changed:
            now = time.perf_counter()
            self._since = now if not self._open else self._since
            self._open += more
            self.active_s += 0.0 if self._open else now - self._since
            self.idle_since = now
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """Keep the error for those who wait."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way."""
        return self._open == 0

    def wait(self) -> None:
        """Wait until all that was submitted is done. Raises what `failed` was called with."""
        with self._changed:
            while self._open and self._error is None:
                self._changed.wait()
        self.check()

    def check(self) -> None:
        """Raise what `failed` was called with, if it was."""
        if self._error is not None:
            raise self._error

    @property
    def has_failed(self) -> bool:
        """Return whether `failed` was called."""
        return self._error is not None


class GroupUpdater(ABC):
    """Updates groups by their number in the layout, in the order of submission, while the rank goes on.

    What is read is the record that counts, what is written the other one, so nothing that counts is overwritten.
    """

    @property
    @abstractmethod
    def progress(self) -> UpdateProgress:
        """Return what has been submitted and done."""

    @abstractmethod
    def gradient(self, index: int) -> Tensor:
        """Return memory of zeros for the whole gradient of a group, (numel,), taken from the account before."""

    @abstractmethod
    def submit(
        self, index: int, record: int, gradient: Tensor | None, idle: frozenset[str], terms: UpdateTerms
    ) -> None:
        """Update a group, whose `record` counts, by its gradient; None: the one in the file.

        Where ranks divide the group, it is that of this rank's parameters, at the start of the memory from `gradient`.
        A gradient in memory is given back to the account when it is no longer read.
        """

    @abstractmethod
    def keep(self, index: int, gradient: Tensor) -> None:
        """Write a gradient to the file, and give its memory back."""

    @abstractmethod
    def drop(self, index: int, gradient: Tensor) -> None:
        """Give the memory of a gradient back that is not needed."""

    @abstractmethod
    def close(self) -> None:
        """End what updates, after what it has begun."""
