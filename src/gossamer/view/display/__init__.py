"""Displays: what a person sees while a run goes on. `gossamer.view.open_display.open_display` chooses one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.records import Record


class Display(ABC):
    """Is fed with the records of one run. Whoever opens it closes it; it owns no thread and no file."""

    @abstractmethod
    def show(self, record: Record) -> None:
        """News: fold it in, and show it now or a little later."""

    @abstractmethod
    def recall(self, record: Record) -> None:
        """A record from before a resume: it is known, and no news."""

    @abstractmethod
    def tick(self) -> None:
        """Time has passed without news; what waits to be shown may be shown now."""

    @abstractmethod
    def close(self) -> None:
        """Show the last state and leave the terminal as it was; a second call does nothing."""
