"""The phases of a run over several hosts, on each of which the same command was started: by hand, over ssh, on Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.api.launcher import Launcher
from gossamer.api.phase_runner import PhaseRunner, Spread, prepared
from gossamer.launch.agreement import Agreement
from gossamer.launch.agreement_hosts import HostSockets
from gossamer.launch.rendezvous_config import Node
from gossamer.launch.signals import noted_stops
from gossamer.settings.phases import Phase
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import Interrupted
from gossamer.view.failed_start import rollback_failed_start


@dataclass(slots=True)
class HostsRunner(PhaseRunner):
    """The command on one host. The ranks of each phase meet anew, and `line` stays open beside them."""

    node: Node
    line: HostSockets
    _refusal: BaseException | None = field(default=None, repr=False)  # why this host does not go on

    @property
    def is_first(self) -> bool:
        return self.line.is_first

    def spread(self, config: RunConfig) -> Spread:
        processes = config.machines.processes
        return Spread(ranks=processes * self.node.nodes, local_ranks=processes, shared=self.line.shared)

    def agreed(self, make: Callable[[], str]) -> str:
        with ExitStack() as waiting:
            is_stopped = None if self.is_first else waiting.enter_context(noted_stops())

            def refusal() -> BaseException | None:
                if self._refusal is None and is_stopped is not None and is_stopped():
                    return Interrupted("stopped between phases")
                return self._refusal

            return Agreement(self.line).agreed(make, refusal)

    def given(self, folder: Path) -> None:
        self._refusal = self.line.give(folder)
        self.agreed(lambda: "")

    @property
    def holds(self) -> bool:
        return self.is_first or not self.line.shared

    def train(self, phase: Phase, *, resume: bool) -> bool:
        with rollback_failed_start(phase.directory) if self.holds else nullcontext():  # what it began with, once
            self.agreed(lambda: prepared(phase))
            launch = Launcher(directory=phase.directory, config=phase.config, resume=resume)
            _, is_asked = launch.met(self.node, lambda folder: prepared(phase))
        return is_asked
