"""Processor quotas and memory limits per host, by cgroup version 1 or 2, whichever the machine has mounted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.spec.errors import BadInput, RunFailed

PERIOD_US = 5000  # short against a training step, so that a slow host is slow and not stop-and-go
LEAST_QUOTA_US = 1000  # the kernel takes no less
MOST_OF_CORES = 0.8  # the rest is for the delay lines, the supervisor and the kernel

_OPTIONAL = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # kernels that do not account for swap lack them


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount point of one cgroup controller ("cpu" or "memory"): the folder of its hierarchy, and its version."""

    controller: str
    path: Path
    version: int

    def host(self, prefix: str, host: int) -> Path:
        """Return the cgroup folder of one host."""
        return self.path / prefix / f"h{host}"


def find(controller: str, *, mounts: Path = Path("/proc/self/mounts")) -> Mount:
    """Return the mounted hierarchy that has `controller`; raises BadInput where there is none."""
    for line in mounts.read_text("utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            return Mount(controller, Path(where), 1)
        listed = Path(where) / "cgroup.controllers"
        if kind == "cgroup2" and listed.exists() and controller in listed.read_text("ascii").split():
            return Mount(controller, Path(where), 2)
    raise BadInput(
        f"a laboratory with a {'quota' if controller == 'cpu' else 'limit'} per host needs the cgroup controller "
        f"{controller!r}, and no mounted cgroup hierarchy has it: mount it, or leave {controller} out",
        key=controller,
    )


def cores_granted(cpu: Sequence[float], *, present: int) -> tuple[float, ...]:
    """Return the cores per host: the request `cpu`, scaled down together to at most 0.8 of those `present`.

    Raises BadInput where a host would get less than the kernel's smallest quota (0.2 of a core).
    """
    scale = min(1.0, MOST_OF_CORES * present / sum(cpu)) if cpu else 1.0
    granted = tuple(c * scale for c in cpu)
    least = LEAST_QUOTA_US / PERIOD_US
    for host, cores in enumerate(granted):
        if cores < least - 1e-9:
            raise BadInput(
                f"host {host} would get {cores:.3f} of a core (asked {cpu[host]:g} of {sum(cpu):g}, {present} cores "
                f"present), and the kernel's smallest quota is {LEAST_QUOTA_US / 1000:g} ms every "
                f"{PERIOD_US / 1000:g} ms, {least:g} of a core: take fewer hosts, or cpu shares that differ less",
                key="cpu",
            )
    return granted


def quota_files(cores: float, version: int) -> dict[str, str]:
    """Return the files and texts that give a cgroup `cores`, for cgroup version 1 or 2."""
    quota_us = round(cores * PERIOD_US)
    if version == 2:
        return {"cpu.max": f"{quota_us} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def limit_files(limit_bytes: int, version: int) -> dict[str, str]:
    """Return the files and texts that limit a cgroup to `limit_bytes`, for cgroup version 1 or 2.

    The limit includes swap where the kernel accounts for it.
    """
    if version == 2:
        return {"memory.max": str(limit_bytes), "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": str(limit_bytes), "memory.memsw.limit_in_bytes": str(limit_bytes)}


def make(mount: Mount, prefix: str, files: Iterable[Mapping[str, str]]) -> None:
    """Create the cgroups of all hosts; `files` holds one host's settings each."""
    top = mount.path / prefix
    _write(top, {})
    if mount.version == 2:
        for parent in (mount.path, top):
            _enable(mount, parent)
    for host, settings in enumerate(files):
        _write(mount.host(prefix, host), settings)


def killed_for_memory(mount: Mount, prefix: str, host: int) -> int:
    """Return how many processes of a host the kernel killed because its memory limit was reached."""
    name = "memory.events" if mount.version == 2 else "memory.oom_control"
    for line in (mount.host(prefix, host) / name).read_text("ascii").splitlines():
        word, _, count = line.partition(" ")
        if word == "oom_kill":
            return int(count)
    return 0


def cores_present() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def _write(cgroup: Path, settings: Mapping[str, str]) -> None:
    try:
        cgroup.mkdir(exist_ok=True)
        for name, value in settings.items():
            if name not in _OPTIONAL or (cgroup / name).exists():
                (cgroup / name).write_text(value, "ascii")
    except OSError as error:
        raise RunFailed(f"laboratory: cannot set up the cgroup {cgroup}: {error}") from error


def _enable(mount: Mount, parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    try:
        if mount.controller not in control.read_text("ascii").split():
            control.write_text(f"+{mount.controller}", "ascii")
    except OSError as error:
        raise BadInput(
            f"the cgroup {parent} does not delegate its controller {mount.controller!r} ({error}): start from the root "
            f"cgroup of a machine (not of a container that runs processes), or leave {mount.controller} out",
            key=mount.controller,
        ) from None
