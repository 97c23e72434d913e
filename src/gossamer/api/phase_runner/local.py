"""The phases of a run that one command starts on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gossamer.api.launcher import Launcher
from gossamer.api.phase_runner import PhaseRunner, Spread, prepared
from gossamer.launch.agreement import Agreement, Alone
from gossamer.settings.phases import Phase
from gossamer.spec.config import RunConfig
from gossamer.view.failed_start import rollback_failed_start
from gossamer.view.run_lock import held


class LocalRunner(PhaseRunner):
    """The only process that goes through the phases: it starts the ranks of each."""

    @property
    def is_first(self) -> bool:
        return True

    def spread(self, config: RunConfig) -> Spread:
        machines = config.machines
        ranks = machines.processes * max(1, len(machines.hosts))
        return Spread(ranks=ranks, local_ranks=machines.processes, asks_hosts=True)

    def agreed(self, make: Callable[[], str]) -> str:
        return Agreement(Alone()).agreed(make)

    def given(self, folder: Path) -> None:
        pass

    @property
    def holds(self) -> bool:
        return True

    def train(self, phase: Phase, *, resume: bool) -> bool:
        with held(phase.directory.path), rollback_failed_start(phase.directory):
            prepared(phase)
            launch = Launcher(
                directory=phase.directory, config=phase.config, resume=resume, folder=Path.cwd() if resume else None
            )
            return launch.here()
