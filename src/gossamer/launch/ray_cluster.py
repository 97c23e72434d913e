"""Start the same command on several nodes of a Ray cluster, and supervise it to its end (extra `ray`).

One placement group holds the run's resources: a bundle for each node, on different nodes, with a processor (and, where
all nodes have them, a GPU) for each of its ranks. One actor in each bundle runs that node's supervisor and its ranks;
with `machines.processes: 1` that is one actor per rank. What ranks send each other does not pass through Ray. A node
that is lost or preempted is a lost host to the other nodes' supervisors, which save nothing more and end with a report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from pydantic import TypeAdapter

from gossamer.launch.local import to_stderr
from gossamer.launch.ray_host import RayHost, RayPlace
from gossamer.launch.remote_command import node_arguments
from gossamer.launch.remote_hosts import RemoteHost, see_through
from gossamer.process.json_lines import read_line
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.extras import install

_RESERVE_S = 30.0  # for the placement group, whose resources others may hold
_BEGIN_S = 60.0  # for the actors' processes
_TURN_S = 0.2
_TAIL_BYTES = 2000
_WHY = 400  # characters of what Ray says about a lost actor, which may include logs of its own
_LOST = 255  # no exit code of ours: then the other hosts' end does not speak for this one
_PLACE: TypeAdapter[RayPlace] = TypeAdapter(RayPlace)


def launch_ray(
    nodes: int,
    processes: int,
    arguments: Sequence[str],
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    folder: str = "",
    say: Callable[[str], None] = to_stderr,
) -> int:
    """Run `python -m gossamer ARGUMENTS --node-rank I ...` on `nodes` nodes of a cluster; return exit code 0, 2, 3, 4.

    The cluster is the one of RAY_ADDRESS, or else the one that this machine belongs to. processes: ranks on each node.
    files: texts by file name, written on every node; "{files}" in `arguments` is their folder there. env: variables of
    the command. folder: working directory there. say: called with messages for the user. Host 0's output is passed on.
    Raises BadInput where ray is not installed, there is no cluster, it has too few nodes, others hold them, or versions
    differ.
    """
    ray = _imported()
    with ExitStack() as stack:
        _connect(ray, stack)
        bundle = _bundle(ray, nodes, processes)
        group = _reserve(ray, stack, nodes, bundle)
        remotes = [_RayRemote(ray, group, number, bundle, echo=number == 0) for number in range(nodes)]
        for remote in remotes:
            stack.callback(remote.end)
        places = [remote.begin() for remote in remotes]
        _check_versions(remotes, places)
        endpoint = f"{remotes[0].address}:{places[0].port}"
        for number, remote in enumerate(remotes):
            argv = [*arguments, *node_arguments(number, nodes, endpoint)]
            remote.start(argv, dict(files or {}), folder, dict(env or {}))
        return see_through(remotes, say)


def _imported() -> Any:
    try:
        import ray
        import ray.util
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise BadInput(f"--on ray needs the package ray: {install('ray')}") from None
    return ray


def _connect(ray: Any, stack: ExitStack) -> None:
    if ray.is_initialized():  # by whoever called us, who keeps the connection
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise bad_input(
            wanted="a running Ray cluster",
            got=f"none at {address} ({said})",
            do="start one with `ray start --head`, and `ray start --address HOST:PORT` on the other nodes, or set "
            "RAY_ADDRESS",
        ) from None
    stack.callback(ray.shutdown)


def _bundle(ray: Any, nodes: int, processes: int) -> dict[str, float]:
    """Return the resources of one node of the run. Raises BadInput where the cluster has too few such nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = [node for node in alive if node["Resources"].get("CPU", 0) >= processes]
    if len(fit) < nodes:
        found = ", ".join(f"{one['NodeManagerAddress']} ({one['Resources'].get('CPU', 0):g} CPUs)" for one in alive)
        raise bad_input(
            wanted=f"{nodes} nodes of at least {processes} CPUs, one for each process",
            got=f"{len(fit)} in the Ray cluster, which has {found or 'no node'}",
            do="add nodes with `ray start --address HOST:PORT`, or lower --nnodes or machines.processes",
            key="--nnodes",
        )
    has_gpus = sum(node["Resources"].get("GPU", 0) >= processes for node in fit) >= nodes
    return {"CPU": float(processes), **({"GPU": float(processes)} if has_gpus else {})}


def _reserve(ray: Any, stack: ExitStack, nodes: int, bundle: Mapping[str, float]) -> Any:
    group = ray.util.placement_group([dict(bundle) for _ in range(nodes)], strategy="STRICT_SPREAD")
    stack.callback(ray.util.remove_placement_group, group)
    if not group.wait(_RESERVE_S):
        free = ", ".join(
            f"{name} {count:g}" for name, count in sorted(ray.available_resources().items()) if name in bundle
        )
        raise bad_input(
            wanted=f"{nodes} nodes with {', '.join(f'{name} {count:g}' for name, count in bundle.items())} free",
            got=f"in {_RESERVE_S:g} s only {free or 'nothing'} free in the whole cluster",
            do="wait for the others' jobs (`ray status` shows them), or ask for fewer",
            key="--nnodes",
        )
    return group


def _check_versions(remotes: Sequence[_RayRemote], places: Sequence[RayPlace]) -> None:
    first = places[0].versions
    for remote, place in zip(remotes[1:], places[1:], strict=True):
        if place.versions != first:
            has = ", ".join(f"{name} {number}" for name, number in sorted(place.versions.items()))
            wants = ", ".join(f"{name} {number}" for name, number in sorted(first.items()))
            raise bad_input(
                wanted=f"the same versions on every node: {wants} as on {remotes[0].host}",
                got=f"{has} on {remote.host}",
                do="make them equal and start again",
            )


class _RayRemote(RemoteHost):
    """One actor, seen from the driver. `address`: of its node, for the other nodes."""

    def __init__(self, ray: Any, group: Any, number: int, bundle: Mapping[str, float], *, echo: bool) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.host, self.address = f"{number}", ""
        self._ray, self._echo = ray, echo
        self._code: int | None = None
        self._pending: Any = None
        self._lost = ""
        self._tail = b""
        self._actor = (
            ray.remote(RayHost)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
        )
        table = ray.util.placement_group_table(group)
        self._node = str(table["bundles_to_node_id"][number])

    def begin(self) -> RayPlace:
        """Wait for the actor, and return its place. Raises BadInput where it cannot be made."""
        self.address = next(n["NodeManagerAddress"] for n in self._ray.nodes() if n["NodeID"] == self._node)
        try:
            place = read_line(self._ray.get(self._actor.place.remote(), timeout=_BEGIN_S), _PLACE)
        except Exception as error:  # an import that fails there is one of several types of ray's
            said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise bad_input(
                wanted=f"an actor on Ray node {self.address}",
                got=said,
                do="install the same version of Gossamer in the environment of every node",
            ) from None
        self.host = f"{place.hostname} ({self.address})"
        return place

    def start(self, arguments: list[str], files: dict[str, str], folder: str, env: dict[str, str]) -> None:
        """Start the command in the actor."""
        self._ray.get(self._actor.start.remote(arguments, files, folder, env), timeout=_BEGIN_S)

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        if self._pending is None:
            self._pending = self._actor.turn.remote(_TURN_S)
        if not self._ray.wait([self._pending], timeout=0)[0]:
            return None
        try:
            code, wrote = self._ray.get(self._pending)
        except self._ray.exceptions.RayError as error:  # the actor or its node is gone
            why = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
            self._lost, self._code = f"its actor was lost or preempted: {why[:_WHY]}", _LOST
            return self._code
        self._pending = None
        self._write(wrote)
        self._code = None if code is None else int(code)  # None: it runs
        return self._code

    def stop(self) -> None:
        self._actor.stop.remote()

    def hang_up(self) -> None:
        self._actor.hang_up.remote()

    def said(self) -> str:
        tail = "" if self._echo else self._tail.decode("utf-8", "replace")
        return f"{self._lost}\n{tail}".strip()

    def end(self) -> None:
        """Remove the actor; what it runs ends with it."""
        self._ray.kill(self._actor)

    def _write(self, wrote: bytes) -> None:
        self._tail = (self._tail + wrote)[-_TAIL_BYTES:]
        if self._echo and wrote:
            sys.stdout.write(wrote.decode("utf-8", "replace"))
            sys.stdout.flush()
