"""Who runs the phases of a run: one command, the same command on every host, or every rank of a launcher.

All of them go through the phases together. The first prepares the start of a phase while the others wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gossamer.api.resumed_run import prepare_again
from gossamer.settings.phases import Phase
from gossamer.spec.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How many ranks a phase has, and how many of them are on each host.

    asks_hosts: whether hosts can be asked for their memory; shared: whether all of them see one run directory.
    """

    ranks: int
    local_ranks: int
    asks_hosts: bool = False
    shared: bool = True


class PhaseRunner(ABC):
    """One of the processes that go through the phases of a run together. All call the same methods in one order."""

    @property
    @abstractmethod
    def is_first(self) -> bool:
        """Whether this process decides and prepares."""

    @abstractmethod
    def spread(self, config: RunConfig) -> Spread:
        """Return the ranks of a phase with this configuration."""

    @abstractmethod
    def agreed(self, make: Callable[[], str]) -> str:
        """Return what `make`, called on the first process alone, returned there; raise its error on all."""

    @abstractmethod
    def given(self, folder: Path) -> None:
        """Return once the start folder, which the first process has, is there for the ranks of all."""

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Whether this process holds and writes the run's folder: one of those that see the same one."""

    @abstractmethod
    def train(self, phase: Phase, *, resume: bool) -> bool:
        """Train a phase, or go on with it; return whether the user asked to stop, also where it was done just then."""


def prepared(phase: Phase) -> str:
    """Write the configuration of a phase into its run directory, which may be new."""
    if phase.directory.config_file.exists():
        prepare_again(phase.directory, phase.resolved)
    else:
        phase.directory.keep(phase.resolved.config, phase.resolved.origin)
    return ""
