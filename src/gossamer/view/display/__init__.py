"""Displays: the progress of a run, for people. `gossamer.view.open_display.open_display` chooses one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gossamer.spec.records import Record


class Display(ABC):
    """A display of one run's records. Its opener closes it; it owns no thread and no file."""

    @abstractmethod
    def show(self, record: Record) -> None:
        """Take a new record in, and show it now or a little later."""

    @abstractmethod
    def recall(self, record: Record) -> None:
        """Take in a record from before a resume, without showing it."""

    @abstractmethod
    def tick(self) -> None:
        """Show what is pending, where no new record has come for a while."""

    @abstractmethod
    def close(self) -> None:
        """Show the last state and restore the terminal; a second call does nothing."""
