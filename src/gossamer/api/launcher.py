"""The launcher: start the processes of a run, here or on several hosts, and display their records while they work."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml

from gossamer.launch import (
    HostFingerprint,
    HostMeeting,
    LaunchRequest,
    Limits,
    RendezvousConfig,
    RunEnd,
    launch_here,
    launch_hosts,
    launch_met,
    launch_ray,
)
from gossamer.launch.agreement_hosts import HostSockets
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.launch.rendezvous import meet
from gossamer.launch.rendezvous_config import Node
from gossamer.launch.signals import nothing_to_stop
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, Interrupted, RunFailed
from gossamer.spec.records import Event
from gossamer.view.display import Display
from gossamer.view.open_display import open_display
from gossamer.view.run_directory import RunDirectory
from gossamer.view.run_lock import held
from gossamer.view.tracking import Trackers

RUN_FOLDER = "GOSSAMER_RUN_FOLDER"  # the folder that the launching machine has named, for the hosts that it starts
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The launcher of a run's worker processes; `resume`: from a checkpoint.

    Every method that starts processes raises the error that ended the run.
    """

    directory: RunDirectory
    config: RunConfig
    resume: bool
    folder: Path | None = None  # that paths of the configuration are relative to; None: the current one
    checkpoint: int | None = None  # the step to resume from; None: the newest good one

    def here(self) -> bool:
        """Start all processes on this machine, and wait for their end; return whether the user asked for it."""
        with _RecordFollower(self) as watch:
            outcome = launch_here(self._start(self.directory.path, watch.tick))
        _raise_for(outcome, self.directory)
        return outcome.asked_to_stop

    @contextmanager
    def gathered(self, node: Node) -> Iterator[tuple[RunDirectory, HostSockets]]:
        """Meet the other hosts without starting anything; yield the run's directory here, and the line among them."""
        with ExitStack() as stack:
            stack.callback(_drop_empty, self.directory.path)
            meeting = meet(self._invitation(node))
            if meeting.rundir != self.directory.path:  # a name of our own, where host 0 has another
                _drop_empty(self.directory.path)
            if meeting.among.listener is not None:
                meeting.among.listener.close()
            for connection in meeting.others.values():
                stack.callback(connection.close)
            line = HostSockets(
                others=meeting.others,
                hostnames=meeting.among.hostnames,
                host=node.rank,
                shared=meeting.among.shared,
            )
            stack.callback(_drop_empty, meeting.rundir)
            yield RunDirectory(meeting.rundir), line

    def met(self, node: Node, prepare: Callable[[RunDirectory], object]) -> tuple[RunDirectory, bool]:
        """Start this host's processes of a run that the user starts by hand on each host; return the run's directory
        here, and whether the user asked to stop.

        `prepare` fills the directory, which has the name that node 0 gave it.
        """
        found: list[RunDirectory] = []
        with ExitStack() as stack:
            stack.callback(_drop_empty, self.directory.path)  # a name of our own, where host 0 has another
            if node.rank == 0:
                stack.enter_context(held(self.directory.path))

            def start(meeting: HostMeeting) -> LaunchRequest:
                directory = RunDirectory(meeting.rundir)
                if node.rank and not meeting.among.shared:
                    stack.enter_context(held(directory.path))
                prepare(directory)
                found.append(directory)
                watch = stack.enter_context(
                    _RecordFollower(Launcher(directory=directory, config=self.config, resume=self.resume))
                )
                return self._start(directory.path, watch.tick)

            outcome = launch_met(self._invitation(node), start)
        _raise_for(outcome, found[0])
        return found[0], outcome.asked_to_stop

    def _invitation(self, node: Node) -> RendezvousConfig:
        return RendezvousConfig(
            host=node.rank,
            hosts=node.nodes,
            address=node.address,
            port=node.port,
            facts=self._facts(),
            runs=self.directory.path.parent,
            run=self.directory.name,
            say=lambda text: _log.info("%s", text),
            interface=self.config.machines.interface,
        )

    def over_ssh(self, hosts: list[str], plan: Path | None = None) -> None:
        """Start the same command on every host over ssh, with the plan of a file where one is given."""
        self._elsewhere(plan, lambda argv, **rest: launch_hosts(hosts, argv, **rest))

    def on_ray(self, nodes: int, plan: Path | None = None) -> None:
        """Start the same command on so many nodes of a Ray cluster, with the plan of a file where one is given."""
        processes = self.config.machines.processes
        self._elsewhere(plan, lambda argv, **rest: launch_ray(nodes, processes, argv, **rest))

    def _elsewhere(self, plan: Path | None, start: Callable[..., int]) -> None:
        """Call `start` with the command of every host, its files, variables and folder; raise what ended the run.

        The configuration is sent as it is, so that the run is found by it again; the name of the run's folder is a
        variable beside it.
        """
        config = self.config.model_dump(mode="json")
        arguments = ["train", "{files}/run.yaml", *(["--resume", "auto"] if self.resume else [])]
        files = {"run.yaml": yaml.safe_dump(config, sort_keys=False)}
        if plan is not None:
            arguments += ["--plan", "{files}/plan.yaml"]
            files["plan.yaml"] = plan.read_text("utf-8")
        try:
            env = {RUN_FOLDER: self.directory.name}
            if TEACHER_TOKEN in os.environ:
                env[TEACHER_TOKEN] = os.environ[TEACHER_TOKEN]
            code = start(arguments, files=files, env=env, folder=str(self.folder or Path.cwd()))
        finally:
            _drop_empty(self.directory.path)  # where this machine is none of them
        text = f"a host ended with exit code {code}; its message is printed above" if code else ""
        _raise_for(RunEnd(exit_code=code, text=text), self.directory)

    def _start(self, rundir: Path, tick: Callable[[], None]) -> LaunchRequest:
        machines = self.config.machines
        return LaunchRequest(
            argv=(sys.executable, "-m", "gossamer.job.worker", str(rundir.absolute())),
            processes=machines.processes,
            rundir=rundir,
            limits=Limits(heartbeat_s=machines.heartbeat_timeout_s, progress_timeout_s=machines.timeout_s),
            env={
                "GOSSAMER_RESUME": "1" if self.resume else "0",
                "GOSSAMER_FOLDER": str(self.folder or ""),
                "GOSSAMER_CHECKPOINT": "" if self.checkpoint is None else str(self.checkpoint),
            },
            echo=False,
            imports=("transformers.modeling_utils",) if self.config.model.hf else (),
            threads=0 if machines.threads == "auto" else machines.threads,
            tick=tick,
        )

    def _facts(self) -> HostFingerprint:
        from gossamer.store.checkpoint import list_checkpoints  # brings torch

        shared = self.config.model_dump(mode="json", exclude={"run", "machines"})
        return HostFingerprint(
            processes=self.config.machines.processes,
            versions={
                "gossamer": version("gossamer"),
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            config=hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest(),
            checkpoints=list_checkpoints(self.directory.checkpoints) if self.resume else (),
        )


class _RecordFollower:
    """The display and the trackers of a run, fed with the records that its first rank writes."""

    def __init__(self, launch: Launcher) -> None:
        config, self._directory = launch.config, launch.directory
        self._tail = launch.directory.tail()
        self._display: Display = open_display(config.run.display, title=launch.directory.name)
        if launch.resume:
            for record in self._tail.read():
                self._display.recall(record)
        self._trackers = Trackers.start(
            config.run.trackers,
            run_name=launch.directory.name,
            config=config.model_dump(mode="json"),
            directory=launch.directory.path,
            warn=lambda text: self._display.show(Event(level="warning", message=text)),
        )

    def __enter__(self) -> _RecordFollower:
        return self

    def __exit__(self, *_: object) -> None:
        with nothing_to_stop():
            self.tick()
            self._trackers.close()
            self._display.close()

    def tick(self) -> None:
        """Show and log the new records."""
        for record in self._tail.read():
            self._display.show(record)
            self._trackers.log(record)
        self._display.tick()


def _drop_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _raise_for(outcome: RunEnd, directory: RunDirectory) -> None:
    if outcome.exit_code == 2:
        raise BadInput(outcome.text)
    if outcome.exit_code == 4:
        raise Interrupted(outcome.text or f"stopped, with a checkpoint; go on with: gossamer resume {directory.path}")
    if outcome.exit_code:
        raise RunFailed(outcome.text)
