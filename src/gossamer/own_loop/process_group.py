"""The process group of the user's own loop: rendezvous of its ranks, and errors that name the missing ones."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.message import ProcessGroups
from gossamer.comm.patience import PatientStore
from gossamer.job.rank_inputs import RankContext
from gossamer.job.worker import rendezvous
from gossamer.launch.environment import LauncherRank, launcher_of, read_environment
from gossamer.own_loop.compute_clock import ComputeClock
from gossamer.spec.errors import BadInput, PeerLost

_LATE_S = 3.0  # grace period in which other waiting ranks report to the store
_GONE = "the store of the process group cannot be reached"
_SAME_STEPS = "Every rank must call backward and optimizer.step() the same number of times"


@dataclass(frozen=True, slots=True)
class LoopGroup:
    """The group of all ranks of one wrapped loop, with their store and number of hosts. Alone it is rank 0 of 1.

    `clock`: that of this rank's own work, which stands still while it waits for the group.
    """

    rank: int
    ranks: int
    store: PatientStore
    interface: str = ""
    hosts: int = 1
    timeout_s: float = 120.0
    clock: ComputeClock = field(default_factory=ComputeClock, compare=False)

    @property
    def is_alone(self) -> bool:
        """Return whether this rank is the only one."""
        return self.ranks == 1

    @property
    def is_on_one_host(self) -> bool:
        """Return whether all ranks run on this host."""
        return self.hosts == 1

    def meet(self, name: str, backend: str) -> ProcessGroupChannel:
        """Create a new channel between all ranks. All ranks must call it in the same order."""
        meeting = Rendezvous(
            store=dist.PrefixStore(name, self.store.whole),
            rank=self.rank,
            levels=ProcessGroups.flat(self.ranks),
            interface=self.interface,
            timeout_s=self.timeout_s,
            backend=backend,
        )
        return ProcessGroupChannel(meeting)

    def says(self, key: str, said: str) -> None:
        """Write a status of this rank to the store, for other ranks to read. A store that is gone is ignored."""
        try:
            self.store.set(f"{key}/{self.rank}", said)
        except RuntimeError:
            return

    def awaited(self, key: str, doing: str, *, do: str) -> bytes:
        """Return what another rank writes under a key of the store. Raises PeerLost as `lost` makes it.

        A store that the script has opened waits for minutes by itself, and its error says only which key it misses.
        """
        try:
            with self.clock.stopped():
                self.store.wait([key])
                found = self.store.get(key)
        except RuntimeError as error:
            raise self.lost(PeerLost(str(error)), doing, do=do) from error
        return found

    def lost(self, error: PeerLost, doing: str, *, do: str = _SAME_STEPS) -> PeerLost:
        """Return the error for ranks that did not come, which names them as far as the waiting ranks can tell.

        `doing`: the operation that this rank waits in; `do`: what the script is to do. Takes up to 3 s, in which
        waiting ranks report to the store, and 5 s more where the store does not answer.
        """
        self.store.hurry(_LATE_S)
        self.says("waits", doing)
        said: list[str] = []
        deadline = time.monotonic() + _LATE_S
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        try:
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not self.store.check([f"waits/{rank}"])]
                time.sleep(0.05)
            for rank in others:
                left = self.store.get(f"left/{rank}").decode() if self.store.check([f"left/{rank}"]) else ""
                said.append(f"rank {rank} {left or f'did not reach it within {self.timeout_s:g} s'}")
        except RuntimeError:
            said = ["rank 0, which hosts the rendezvous store, cannot be reached"]
        who = "; ".join(said) or f"all ranks wait in it, but no message arrives ({error})"
        return PeerLost(f"rank {self.rank} waits in {doing}: {who}. {do}")


def party(timeout_s: float) -> LoopGroup:
    """Return the group of ranks: of the initialized default process group, else of a launcher's variables, else of this
    process alone. Raises PeerLost for ranks that do not come within `timeout_s`.

    Every wrap of a process has its own keys in the store; all ranks must wrap in the same order.
    """
    if dist.is_available() and dist.is_initialized():
        store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        interface, hosts = os.environ.get("GLOO_SOCKET_IFNAME", ""), 1
    elif launcher_of(os.environ):
        place = read_environment()
        where = _met(place, timeout_s)
        store, rank, ranks, interface, hosts = where.store, where.rank, where.ranks, where.interface, where.hosts
    else:
        return LoopGroup(0, 1, PatientStore(dist.HashStore(), timeout_s))
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = PatientStore(store, timeout_s).under(f"own_loop/{run}")
    try:
        mine = keys.under(str(keys.add(f"wraps/{rank}", 1)))
        mine.set(f"host/{rank}", socket.gethostname())
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} waits in gossamer.wrap: {_GONE}") from error
    names = _hosts(mine, rank, ranks, timeout_s)
    return LoopGroup(rank, ranks, mine, interface, max(hosts, len(names)), timeout_s)


def _hosts(store: PatientStore, rank: int, ranks: int, timeout_s: float) -> set[bytes]:
    """Return the names of the hosts, once every rank has written its own. Raises PeerLost, which names those that have
    not.

    A store that the script has opened waits for minutes by itself, and its error says only which key it misses.
    """
    keys = [f"host/{other}" for other in range(ranks)]
    try:
        store.wait(keys)
        return {store.get(key) for key in keys}
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} waits in gossamer.wrap: {_missing(store, keys, timeout_s)}. Every rank must call "
            "gossamer.wrap the same number of times, in the same order"
        ) from error


def _missing(store: PatientStore, keys: Sequence[str], timeout_s: float) -> str:
    try:
        late = [str(number) for number, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        late = []
    if not late:
        return _GONE
    return f"rank {', '.join(late)} did not reach it within {timeout_s:g} s"


@functools.cache
def _met(place: LauncherRank, timeout_s: float) -> RankContext:
    """Return the process's one rendezvous with a launcher: a second one could not listen on the same port."""
    return rendezvous(place, timeout_s)


def rank() -> int:
    """Return this process's rank in the script's job; 0 if it is alone. Use it for work that one rank should do.

    Raises BadInput for a launcher's variables that are incomplete.
    """
    return _place()[0]


def ranks() -> int:
    """Return the world size: the number of processes that run the same script.

    Raises BadInput for a launcher's variables that are incomplete.
    """
    return _place()[1]


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if launcher_of(os.environ):
        place = read_environment()
        return place.rank, place.ranks
    return 0, 1


def parts_of(share: Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Return the batch fraction of every rank, equal by default. Raises BadInput."""
    parts = tuple(float(one) for one in share) if share is not None else (1.0 / ranks,) * ranks
    if len(parts) != ranks or not all(one > 0 for one in parts):
        raise BadInput(
            f"wanted {ranks} positive numbers, one per rank, got {list(parts)}: pass the batch fraction of every rank",
            key="batch_fractions",
        )
    return parts
