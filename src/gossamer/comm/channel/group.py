"""The channel over torch's process groups (gloo on CPU, NCCL on CUDA), one set of groups per generation.

A generation is one set of groups under its own store prefix. When a collective fails or times out, its groups AND its
buffers are poisoned: on gloo a stopped peer that wakes up later still writes into the buffers of the dropped step. So
the channel refuses every message after the first failure, and keeps the buffers in flight allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.comm.absent_ranks import who_is_lost
from gossamer.comm.channel import UNDER_WAY, Channel, Pending
from gossamer.comm.message import AHEAD, WORD, Collective, Message, ProcessGroups
from gossamer.comm.meter import Meter
from gossamer.comm.patience import GRACE_S, answered
from gossamer.spec.errors import PeerLost


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The settings by which the ranks of a group connect: store, generation, backend, timeout.

    Between islands in local-update training the timeout counts once for each of the `AHEAD` steps that one island may
    wait for another.
    """

    store: dist.Store
    rank: int
    levels: ProcessGroups
    backend: str = "gloo"
    interface: str = ""  # network device of gloo; empty: the one of the host's name
    timeout_s: float = 120.0
    generation: int = 0
    moves: Callable[[], None] = _nothing  # called for every message sent or received, except status messages
    asks: bool = False  # a rank that lost a peer asks the others which: where no supervisor finds out

    def timeout(self, level: str) -> timedelta:
        """Return the timeout of the groups at `level`."""
        is_apart = WORD in self.levels.groups and level != "island"
        return timedelta(seconds=self.timeout_s * (AHEAD if is_apart else 1))


class ProcessGroupChannel(Channel):
    """The channel of one rank over the process groups of every level."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.rank, self.levels, self.meter = meeting.rank, meeting.levels, Meter(meeting.rank)
        self._meeting = meeting
        self._poison = ""
        self._in_flight: dict[int, tuple[Tensor, ...]] = {}
        # Small messages (weights, votes) are on the CPU wherever the gradients are, so gloo is always there.
        self._groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        for level in meeting.levels.groups:
            self._join(level)

    def _join(self, level: str) -> None:
        self._groups[level, "cpu"] = self._connect(level, "gloo")
        if self._meeting.backend == "nccl":
            self._groups[level, "cuda"] = self._connect(level, "nccl")

    def _connect(self, level: str, backend: str) -> dist.ProcessGroup:
        m = self._meeting
        members = m.levels.group(level, m.rank)
        store = dist.PrefixStore(f"{m.generation}/{backend}/{level}/{members[0]}", m.store)
        timeout = m.timeout(level)
        me = members.index(m.rank)
        try:
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return dist.ProcessGroupNCCL(store, me, len(members), options)
            options = dist.ProcessGroupGloo._Options()
            gloo = dist.ProcessGroupGloo
            device = gloo.create_device(interface=m.interface) if m.interface else gloo.create_default_device()
            options._devices = [device]
            options._timeout = timeout
            options._threads = UNDER_WAY + 2  # of two, which are the default, latencies would follow one another
            within_s, what = timeout.total_seconds() + GRACE_S, "the other ranks or their store"
            return answered(lambda: dist.ProcessGroupGloo(store, me, len(members), options), within_s, what)
        except RuntimeError as error:
            raise PeerLost(
                f"rank {m.rank} could not join the process group {level!r} of {len(members)} ranks over {backend} "
                f"within {m.timeout_s:g} s: {_first_line(error)}. Check that all ranks started and that the "
                f"network device {m.interface or '(default)'} reaches them (machines.interface)"
            ) from error

    def widen(self, levels: ProcessGroups) -> None:
        """Create the groups of levels that the rendezvous did not know; all ranks call it between messages."""
        levels = self.levels.and_more(levels)
        self._meeting = replace(self._meeting, levels=levels)
        for (level, _), group in self._groups.items():
            group._set_default_timeout(self._meeting.timeout(level))
        for level in levels.groups:
            if level not in self.levels.groups:
                self._join(level)
        self.levels = levels

    def start(self, message: Message) -> Pending:
        if self._poison:
            raise PeerLost(f"the channel of rank {self.rank} sends no more messages: {self._poison}")
        group = self.levels.group(message.level, self.rank)
        self.meter.count(message, group)
        self._moved(message)
        parts, begin = _prepared(message, group, self.rank)
        self._in_flight[id(parts)] = (*parts, *message.parts)
        try:
            works = [
                w for i, p in enumerate(message.parts) for w in begin(self._groups[message.level, p.device.type], i)
            ]
        except RuntimeError as error:
            raise self._poisoned(message, error) from error
        return _Under(self, message, parts, works)

    def _arrived(self, message: Message, parts: tuple[Tensor, ...]) -> None:
        del self._in_flight[id(parts)]
        self._moved(message)

    def _moved(self, message: Message) -> None:
        if message.level != WORD:  # status messages flow even when a rank makes no progress
            self._meeting.moves()

    def _poisoned(self, message: Message, error: RuntimeError) -> PeerLost:
        group, is_first = self.levels.group(message.level, self.rank), not self._poison
        self._poison = (
            f"rank {self.rank} lost a peer among ranks {list(group)} during {message.combine.value} of "
            f"{message.nbytes} bytes: {_first_line(error)}"
        )
        if self._meeting.asks and is_first:
            store = dist.PrefixStore(f"{self._meeting.generation}", self._meeting.store)
            self._poison += f"; {who_is_lost(store, self.rank, self.levels.everyone)}"
        return PeerLost(self._poison)

    def close(self) -> None:
        self._poison = self._poison or "the channel was closed"
        self._groups.clear()


class _Under(Pending):
    def __init__(
        self, group: ProcessGroupChannel, message: Message, parts: tuple[Tensor, ...], works: list[dist.Work]
    ) -> None:
        self._group, self._message, self._parts, self._works = group, message, parts, works

    def wait(self) -> tuple[Tensor, ...]:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._group._poisoned(self._message, error) from error
        self._group._arrived(self._message, self._parts)
        return self._parts


_WHERE_IT_WAS_BUILT = re.compile(r"^\[[^\]]*:\d+\]\s*")  # gloo begins with a line of its own sources
_REDUCTIONS = {Collective.SUM: dist.ReduceOp.SUM, Collective.MAX: dist.ReduceOp.MAX, Collective.OR: dist.ReduceOp.BOR}
_BY_HAND = 64  # ranks up to which a shuffle is started from Python, a call for each peer
_UNEVEN, _EVEN = 0, 1  # tags: uneven messages have an order of their own between two ranks
_Begin = Callable[[dist.ProcessGroup, int], list[dist.Work]]


def _prepared(message: Message, group: tuple[int, ...], rank: int) -> tuple[tuple[Tensor, ...], _Begin]:
    """The tensors the replies arrive in, and how to start part i."""
    sent = tuple(p.contiguous() for p in message.parts)
    if message.splits is not None:
        return _uneven(message, sent, group.index(rank))
    if message.combine in _REDUCTIONS:
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCTIONS[message.combine]
        return sent, lambda group, i: [group.allreduce([sent[i]], options)]
    me, ranks = group.index(rank), len(group)
    if message.combine is Collective.GATHER:
        stacked = tuple(torch.empty((ranks, *p.shape), dtype=p.dtype, device=p.device) for p in sent)

        def gather(group: dist.ProcessGroup, i: int) -> list[dist.Work]:
            if ranks == 2 and not sent[i].is_cuda:  # a ring of more ranks crosses the links of islands less often
                return _between(group, [sent[i]] * ranks, list(stacked[i].unbind(0)), me)
            return [group.allgather([list(stacked[i].unbind(0))], [sent[i]])]

        return stacked, gather
    shuffled = tuple(torch.empty_like(p) for p in sent)

    def shuffle(group: dist.ProcessGroup, i: int) -> list[dist.Work]:
        if ranks <= _BY_HAND and not sent[i].is_cuda:
            return _between(group, sent[i].tensor_split(ranks), shuffled[i].tensor_split(ranks), me)
        return [group.alltoall_base(shuffled[i], sent[i], [], [], dist.AllToAllOptions())]

    return shuffled, shuffle


def _between(
    group: dist.ProcessGroup, mine: Sequence[Tensor], theirs: Sequence[Tensor], me: int, tag: int = _EVEN
) -> list[dist.Work]:
    """Send mine[k] to rank k and receive theirs[k] from it, where they are not empty; keep mine[me].

    All receives begin before any send. Gloo sends what a peer has asked for, and a request that is written after a
    rank's own bytes arrives after them: then the two directions of a slow link take turns, in twice the time.
    """
    theirs[me].copy_(mine[me])
    works = [group.recv([part], peer, tag) for peer, part in enumerate(theirs) if peer != me and part.numel()]
    return works + [group.send([part], peer, tag) for peer, part in enumerate(mine) if peer != me and part.numel()]


def _uneven(message: Message, sent: tuple[Tensor, ...], me: int) -> tuple[tuple[Tensor, ...], _Begin]:
    """Point to point, and only between ranks that have something for each other."""
    splits, arriving = message.splits or (), message.arriving or ()
    got = tuple(torch.empty((sum(arriving), *p.shape[1:]), dtype=p.dtype, device=p.device) for p in sent)

    def begin(group: dist.ProcessGroup, i: int) -> list[dist.Work]:
        if sent[i].is_cuda:  # NCCL pairs sends with receives only inside one call
            return [group.alltoall_base(got[i], sent[i], list(arriving), list(splits), dist.AllToAllOptions())]
        theirs, mine = torch.split(got[i], list(arriving)), torch.split(sent[i], list(splits))
        return _between(group, mine, theirs, me, _UNEVEN)

    return got, begin


def _first_line(error: BaseException) -> str:
    said = _WHERE_IT_WAS_BUILT.sub("", str(error).strip())
    return (said.splitlines() or [type(error).__name__])[0][:200]
