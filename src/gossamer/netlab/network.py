"""An emulated network of hosts: it exists inside the `with` block, and nothing of it remains after."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from gossamer.netlab import cgroup, cleanup, delay
from gossamer.netlab.calibration import real_cores
from gossamer.netlab.counters import ByteCounts, read_links, read_pairs
from gossamer.netlab.hosts import Exited, HostOutput, enter, follow, rank_environment, stop
from gossamer.netlab.link_events import EventSchedule, LinkEvent
from gossamer.netlab.names import DEVICE, LINE, LabNames, address
from gossamer.netlab.namespaces import lead_through_line, wire
from gossamer.netlab.requirements import lab_unavailable
from gossamer.netlab.tools import batch
from gossamer.netlab.topology import LabTopology
from gossamer.netlab.traffic_shaping import LinkRates
from gossamer.spec.errors import BadInput, RunFailed

Environment = Callable[[int], Mapping[str, str]]


class Lab:
    """An emulated network of real hosts on this machine.

    `with Lab(LabTopology(4, rate_bytes_per_s=12.5e6)) as lab: lab.run([...])`.

    Raises BadInput, naming what is missing, where it cannot be created. It is removed at the end of the block. When
    this process is killed, a cleanup process removes it; when that was killed too, the next emulated network does.
    """

    def __init__(self, topology: LabTopology) -> None:
        self.topology = topology
        self.cores: tuple[float, ...] = ()  # granted per host
        self._shape = LinkRates(topology)
        self._names: LabNames | None = None
        self._mounts: tuple[cgroup.Mount, ...] = ()
        self._warden: subprocess.Popen[bytes] | None = None
        self._lines: list[subprocess.Popen[bytes]] = []
        self._spawned: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        reason = lab_unavailable()
        if reason is not None:
            raise BadInput(reason)
        cleanup.sweep()
        self.cores = cgroup.cores_granted(self.topology.cpu, present=cgroup.cores_present())
        wanted = [("cpu", self.topology.cpu), ("memory", self.topology.memory())]
        self._mounts = tuple(cgroup.find(controller) for controller, given in wanted if given)
        self._names = LabNames(cleanup.claim({str(mount.path) for mount in self._mounts}))
        try:
            self._build(self._names)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def prefix(self) -> str:
        """The prefix of the names of this network's namespaces."""
        return self._standing().prefix

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return address(self._known(host))

    def entry(self, host: int) -> str:
        """Return a command line for any root shell that opens a shell on a host, under the host's limits."""
        namespace, cgroups = self._place(host)
        joins = "".join(f"echo $$ >{cgroup}/cgroup.procs && " for cgroup in cgroups)
        return f"sh -c '{joins}exec nsenter --net={namespace} bash'"

    def spawn(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` on a host with the rank environment; stderr goes where stdout goes."""
        top = self.topology
        threads = math.floor(self.cores[host]) if self.cores else cgroup.cores_present() // top.hosts
        environment = {**os.environ, **rank_environment(host, top.hosts, threads=max(1, threads)), **(env or {})}
        process = subprocess.Popen(
            enter(*self._place(host), argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=None if stdout is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the hosts once, by `signal`, and not also from the terminal
        )
        self._spawned.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        env: Environment | None = None,
        output: HostOutput | None = None,
        exited: Exited | None = None,
        changes: Sequence[LinkEvent] = (),
    ) -> tuple[int, ...]:
        """Run `command` on every host and wait; return the exit codes in host order (-n: ended by signal n).

        `env(host)` adds to the rank environment. `output(host, line)` receives the lines that hosts write (None: they
        go to this process's own output); `exited(host, code)` is called in the order in which hosts end; `changes` are
        applied to the links meanwhile.
        """
        for change in changes:
            change.applied(self._shape)  # raises for a wrong one before anything starts
        pipe = None if output is None else subprocess.PIPE
        started: list[subprocess.Popen[bytes]] = []
        try:
            for host in range(self.topology.hosts):
                started.append(self.spawn(host, command, env=env(host) if env else None, stdout=pipe))
            calendar = EventSchedule(changes, self.change)
            return tuple(follow(started, output=output, exited=exited, meanwhile=calendar.keep))
        finally:
            stop(started)

    def signal(self, number: int) -> None:
        """Send a signal to every command that still runs."""
        for process in self._spawned:
            if process.poll() is None:
                process.send_signal(number)

    def counters(self) -> dict[str, ByteCounts]:
        """Return the kernel's byte counters as (tx_bytes, rx_bytes): "h0" of a host's link, "island0" of an uplink.

        As interfaces count: a large segment that the kernel moves in one piece counts its headers once.
        """
        return read_links(self._standing().switch, self.topology)

    def pairs(self) -> dict[tuple[int, int], int]:
        """Return the bytes sent from one host to another, headers counted per packet, as on a real network."""
        return read_pairs(self._standing().switch, self.topology)

    def slow(self, host: int, rate_bytes_per_s: float, *, to: int | None = None) -> None:
        """Set another rate for a host's link (or for its pair with `to`, both directions), at once."""
        self.change(LinkEvent(0.0, "slow", host, to, rate_bytes_per_s))

    def cut(self, host: int, *, to: int | None = None) -> None:
        """Drop all packets to and from a host (or between it and `to`) silently, as a cable cut elsewhere does."""
        self.change(LinkEvent(0.0, "cut", host, to))

    def heal(self, host: int, *, to: int | None = None) -> None:
        """Undo `slow` and `cut` of a host's link and its pairs (or of its pair with `to` alone)."""
        self.change(LinkEvent(0.0, "heal", host, to))

    def change(self, change: LinkEvent) -> None:
        """Apply a link event now, whatever its time."""
        names, before = self._standing(), self._shape
        self._shape = shape = change.applied(before)
        for host in range(self.topology.hosts):
            _retell(names.host(host), [s.egress_lines(self._device(), host, verb="change") for s in (before, shape)])
            _retell(names.switch, [s.ingress_lines(host, verb="change") for s in (before, shape)])

    def calibrate(self) -> tuple[float, ...]:
        """Spin on every host at the same time; return the cores that each got. Takes 1.6 s; () without quotas."""
        return real_cores(self.cores, lambda host, argv: self.spawn(host, argv, stdout=subprocess.PIPE))

    def killed_for_memory(self) -> dict[int, int]:
        """Return how many processes the kernel killed at the memory limit, for every host with such a process."""
        prefix = self._standing().prefix
        mounts = [mount for mount in self._mounts if mount.controller == "memory"]
        found = {h: cgroup.killed_for_memory(m, prefix, h) for m in mounts for h in range(self.topology.hosts)}
        return {host: count for host, count in found.items() if count}

    def down(self) -> None:
        """Kill every process of the emulated network and remove it. Safe to repeat."""
        if self._names is None:
            return
        stop([*self._spawned, *self._lines])
        cleanup.remove(self._names.prefix)
        self._names = None
        self._spawned, self._lines = [], []
        if self._warden is not None:
            stop([self._warden])  # last: it takes over where this is interrupted

    def _build(self, names: LabNames) -> None:
        self._warden = subprocess.Popen(
            [sys.executable, "-I", cleanup.__file__, names.prefix],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for mount in self._mounts:
            cgroup.make(mount, names.prefix, self._limits(mount))
        wire(names, self.topology)
        batch("tc", names.switch, self._shape.uplink_lines())
        for host in range(self.topology.hosts):
            if self.topology.delay_s > 0:
                self._lines.append(self._delay_line(names, host))
                lead_through_line(names, self.topology, host)
            batch("tc", names.host(host), self._shape.egress_lines(self._device(), host))
            batch("tc", names.switch, self._shape.ingress_lines(host))

    def _limits(self, mount: cgroup.Mount) -> list[dict[str, str]]:
        if mount.controller == "cpu":
            return [cgroup.quota_files(cores, mount.version) for cores in self.cores]
        return [cgroup.limit_files(limit, mount.version) for limit in self.topology.memory()]

    def _delay_line(self, names: LabNames, host: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-I", delay.__file__, LINE, DEVICE, str(self.topology.delay_s)]
        line = subprocess.Popen(
            enter(names.path(host), [], argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        assert line.stdout is not None
        if line.stdout.readline() != b"ready\n":
            line.wait()
            raise RunFailed(
                "laboratory: the delay line did not start (its error output is above): check that /dev/net/tun exists"
            )
        return line

    def _device(self) -> str:
        return LINE if self._lines else DEVICE

    def _standing(self) -> LabNames:
        if self._names is None:
            raise RunFailed("the laboratory is not up: use it inside `with Lab(topology) as lab:`")
        return self._names

    def _place(self, host: int) -> tuple[str, list[Path]]:
        names = self._standing()
        return names.path(self._known(host)), [mount.host(names.prefix, host) for mount in self._mounts]

    def _known(self, host: int) -> int:
        self._shape.others(host)
        return host


def _retell(namespace: str, lines: Sequence[list[str]]) -> None:
    before, after = lines
    if after != before:
        batch("tc", namespace, after)
