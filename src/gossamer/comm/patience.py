"""Ask what may never answer, and wait for it only so long.

torch waits without limit for the answer of a store, also where its own time is over: it tells the store so first. So a
rank whose store is on a host that was cut off, or whose process hangs, would wait until TCP gives up, or for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")

GRACE_S = 5.0  # after torch's own time, whose error says more than that no answer came


class NoAnswer(RuntimeError):
    """An operation that has not ended in its time. It is a RuntimeError, as what torch raises for its own."""


@dataclass(slots=True)
class _Asked(Generic[T]):
    """The answer of an operation that runs in a thread."""

    found: T | None = None
    error: BaseException | None = None
    is_over: bool = False

    def ask(self, operation: Callable[[], T]) -> None:
        try:
            self.found = operation()
        except BaseException as error:
            self.error = error
        self.is_over = True


def answered(operation: Callable[[], T], within_s: float, what: str) -> T:
    """Return what `operation` returns; raise what it raises, and NoAnswer where it takes longer than `within_s`.

    `what`: who was asked, for that error. The thread of an operation that does not end is left behind.
    """
    asked = _Asked[T]()
    thread = threading.Thread(target=asked.ask, args=(operation,), name="gossamer-asks", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, which begins no threads any more
        return operation()
    thread.join(within_s)
    if not asked.is_over:
        raise NoAnswer(f"timed out: no answer of {what} within {within_s:g} s")
    if asked.error is not None:
        raise asked.error
    return asked.found  # type: ignore[return-value]  # an operation may return None


@dataclass(slots=True)
class _Patience:
    """How long an operation on a store may take, and whether one has already got no answer."""

    timeout_s: float
    is_over: bool = False


class PatientStore:
    """The keys of a store, every operation on which ends, within `timeout_s` and 5 s.

    torch lets one thread at a time ask a store. So once an answer has not come, further operations fail at once. All
    raise RuntimeError, as torch does. `whole`: the store itself.
    """

    def __init__(self, whole: dist.Store, timeout_s: float, *, shared: _Patience | None = None) -> None:
        self.whole, self._patience = whole, shared or _Patience(timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._answered(lambda: self.whole.set(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, once it is there."""
        return bytes(self._answered(lambda: self.whole.get(key)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._answered(lambda: self.whole.check(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; return the sum."""
        return int(self._answered(lambda: self.whole.add(key, amount)))

    def wait(self, keys: list[str]) -> None:
        """Wait until all keys are there."""
        limit = timedelta(seconds=self._patience.timeout_s)
        self._answered(lambda: self.whole.wait(keys, limit))

    def under(self, prefix: str) -> PatientStore:
        """Return the keys that begin with `prefix`, with the same patience."""
        return PatientStore(dist.PrefixStore(prefix, self.whole), self._patience.timeout_s, shared=self._patience)

    def hurry(self, timeout_s: float) -> None:
        """Let operations take no longer than this from now on, as what they would say is no longer needed."""
        self._patience.timeout_s = min(timeout_s, self._patience.timeout_s)

    def _answered(self, operation: Callable[[], T]) -> T:
        what = "the store of the ranks"
        if self._patience.is_over:
            raise NoAnswer(f"timed out: {what} does not answer")
        try:
            return answered(operation, self._patience.timeout_s + GRACE_S, what)
        except NoAnswer:
            self._patience.is_over = True
            raise
