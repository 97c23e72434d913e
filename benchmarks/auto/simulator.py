"""Simulate the gradient exchange of one training step event by event, to check the forecast of `auto` against it.

It shares no code with gossamer, on purpose: a mistake of the forecast must not be made here a second time.

Model, of one rank that stands for all (t in seconds since the last backward pass of the step began):
    backward  ends at backward_s + delay, and bucket j is full at ready_s[j] + delay(so far)
    turn      the communication thread encodes a message, or decodes a reply: one turn at a time, in the order given
    delay     + `stolen` for every CPU second of a turn while the backward pass runs: both share a processor, and run at
              1 / (1 + stolen) of their speeds meanwhile
    hop       a message is `hops` hops in a row; a hop is sent when the one before it has arrived, takes
              bytes / rate on its wire (first ready, first served: one at a time), then the latency (any number at once)
    step_s    = compute_s + delay + max(0, end of the last turn - end of the backward pass)
Not modeled: loss of packets, slow starts of TCP, ranks that differ, and work of the transport on the processor.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_EVENTS = 32  # per message: more hops than this are grouped, which keeps the sums of bytes and latencies


@dataclass(frozen=True, slots=True)
class Message:
    """A message: the most bytes that any rank sends or receives, and how many hops of it wait for each other."""

    nbytes: int
    hops: int
    wire: str = "all"


@dataclass(frozen=True, slots=True)
class Job:
    """The exchange of one bucket, full `ready_s` after the start of the backward pass if nothing delays that.

    `turns`: CPU seconds of the communication thread before each of the messages and after the last reply.
    """

    ready_s: float
    turns: tuple[float, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """What the messages of one wire share."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """The simulated step. `exposed_s`: its part after the backward pass. `order`: the job of every turn, as played."""

    step_s: float
    exposed_s: float
    order: tuple[int, ...]


def ring(nbytes: int, ranks: int, *, wire: str = "all") -> tuple[Message, ...]:
    """Return the message of a ring all-reduce of `nbytes`: reduce-scatter, then all-gather, of ranks-ths."""
    return (Message(math.ceil(2 * (ranks - 1) * nbytes / ranks), 2 * (ranks - 1), wire),)


def gather(nbytes_each: int, ranks: int, *, wire: str = "all") -> tuple[Message, ...]:
    """Return the message of a ring all-gather to which every rank adds `nbytes_each`."""
    return (Message((ranks - 1) * nbytes_each, ranks - 1, wire),)


def shuffle(nbytes: int, ranks: int, *, wire: str = "all") -> tuple[Message, ...]:
    """Return the message of an all-to-all in which every rank has `nbytes`, a ranks-th of it for each."""
    return (Message(math.ceil((ranks - 1) * nbytes / ranks), min(1, ranks - 1), wire),)


def tree(nbytes: int, ranks: int, *, wire: str = "all") -> tuple[Message, ...]:
    """Return the messages of recursive doubling among the largest power of two of the ranks.

    Ranks beyond that power send their part to one of the others before, and receive the sum after.
    """
    rounds = ranks.bit_length() - 1
    outside = 0 if ranks == 1 << rounds else 2
    return (Message(nbytes, 1, wire),) * (rounds + outside)


def star(nbytes: int, ranks: int, *, wire: str = "all") -> tuple[Message, ...]:
    """Return the messages of a star: everything to a hub, and the sum back. The hub's link carries the most."""
    return (Message((ranks - 1) * nbytes, min(1, ranks - 1), wire),) * 2


def simulate(
    jobs: Sequence[Job],
    *,
    links: Mapping[str, Link],
    compute_s: float,
    backward_s: float,
    stolen: float,
    order: str | int | Sequence[int] = "ready",
    at_once: int = 8,
) -> Step:
    """Simulate a step that computes `compute_s`, of which the last `backward_s` are its last backward pass.

    `stolen`: seconds by which a CPU second of the communication thread delays the backward pass: 0 (a core of its own)
    to 1 (the same core). `order`: "ready" plays what has come, the lowest job first, and never waits for a turn while
    another one could be played; a look-ahead L plays (job, round r) in the order of (job + L r, r), and waits for each;
    a sequence of jobs plays exactly these turns. `at_once`: messages under way at one time, others wait in a line.

    Raises ValueError where the jobs, the wires or the order do not fit together.
    """
    _check(jobs, links, compute_s, backward_s, stolen, at_once)
    network, turns, processor = _Network(links, at_once), _Turns(jobs, order), _Processor(backward_s, stolen)
    while turns.has_more:
        while (reply := network.next_reply(processor.now_s)) is not None:
            turns.may_play(reply[1])
        turns.fill(processor)
        job = turns.take()
        if job is None:
            full_s = turns.next_full_s(processor)
            reply = network.next_reply(full_s)
            processor.now_s = full_s if reply is None else reply[0]
            if reply is not None:
                turns.may_play(reply[1])
            continue
        turn = turns.played[job] - 1
        processor.run(jobs[job].turns[turn])
        if turn < len(jobs[job].messages):
            network.start(processor.now_s, job, jobs[job].messages[turn])
    exposed_s = max(0.0, processor.now_s - processor.backward_end_s)
    return Step(compute_s + processor.delay_s + exposed_s, exposed_s, tuple(turns.order))


@dataclass(slots=True)
class _Processor:
    """The time, and the delay of the backward pass up to now."""

    backward_s: float
    stolen: float
    now_s: float = 0.0
    delay_s: float = 0.0

    @property
    def backward_end_s(self) -> float:
        """When the backward pass ends if the communication thread has nothing more to do."""
        return self.backward_s + self.delay_s

    def run(self, cpu_s: float) -> None:
        """Run a turn. While the backward pass runs too, both get on by the same seconds, each at 1 / (1 + stolen)."""
        overlap_s = min(cpu_s, max(0.0, self.backward_end_s - self.now_s))
        self.now_s += cpu_s + self.stolen * overlap_s
        self.delay_s += self.stolen * overlap_s


class _Turns:
    """The turns of the communication thread: those that can be played now, and which of them is next."""

    def __init__(self, jobs: Sequence[Job], order: str | int | Sequence[int]) -> None:
        self.played = [0] * len(jobs)  # turns, by job
        self.order: list[int] = []
        self._all = sum(len(job.turns) for job in jobs)
        self._places = _places(jobs, order)
        self._waiting: list[tuple[int, int]] = []  # heap of (place in the order, or the job where there is none; job)
        self._to_fill = deque(sorted((one.ready_s, job) for job, one in enumerate(jobs)))

    @property
    def has_more(self) -> bool:
        return len(self.order) < self._all

    def next_full_s(self, processor: _Processor) -> float:
        """Return when the next bucket is full if the backward pass has the processor for itself until then."""
        return self._to_fill[0][0] + processor.delay_s if self._to_fill else math.inf

    def fill(self, processor: _Processor) -> None:
        """Take note of all buckets that are full by now."""
        while self.next_full_s(processor) <= processor.now_s:
            self.may_play(self._to_fill.popleft()[1])

    def may_play(self, job: int) -> None:
        """Take note that the bucket of `job` is full, or that the reply to its last message is here."""
        place = job if self._places is None else self._places[job][self.played[job]]
        heapq.heappush(self._waiting, (place, job))

    def take(self) -> int | None:
        """Return the job whose turn is played now; None: wait."""
        if not self._waiting or (self._places is not None and self._waiting[0][0] != len(self.order)):
            return None
        job = heapq.heappop(self._waiting)[1]
        self.played[job] += 1
        self.order.append(job)
        return job


def _places(jobs: Sequence[Job], order: str | int | Sequence[int]) -> list[list[int]] | None:
    """Return by job the place of each of its turns in a fixed order, or None where there is none."""
    if order == "ready":
        return None
    if isinstance(order, int) and order >= 0:
        keys = [(job + order * r, r, job) for job, one in enumerate(jobs) for r in range(len(one.turns))]
        order = [job for _, _, job in sorted(keys)]
    turns = {job: len(one.turns) for job, one in enumerate(jobs)}
    if isinstance(order, (str, int)) or Counter(order) != turns:
        raise ValueError(
            f"order: wanted 'ready', a look-ahead from 0, or each job once per turn {turns}, got {order!r}"
        )
    places: list[list[int]] = [[] for _ in jobs]
    for place, job in enumerate(order):
        places[job].append(place)
    return places


class _Network:
    """The messages under way, as a heap of (time, number, hops left, hop): a hop is ready to be sent, or all arrived.

    The number makes the heap serve what is ready at the same time in the order of starting.
    """

    def __init__(self, links: Mapping[str, Link], at_once: int) -> None:
        self._links, self._at_once = links, at_once
        self._free_s = dict.fromkeys(links, 0.0)
        self._events: list[tuple[float, int, int, _Hop]] = []
        self._line: deque[tuple[int, Message]] = deque()
        self._under_way = self._number = 0

    def start(self, at_s: float, job: int, message: Message) -> None:
        """Send the message of `job`, or let it wait while too many others are under way."""
        if self._under_way == self._at_once:
            self._line.append((job, message))
            return
        self._under_way += 1
        link, events = self._links[message.wire], min(message.hops, MOST_EVENTS)
        each = max(1, events)
        hop = _Hop(job, message.wire, message.nbytes / each / link.bytes_per_s, message.hops / each * link.latency_s)
        self._push(at_s, events, hop)

    def next_reply(self, until_s: float) -> tuple[float, int] | None:
        """Let time pass until a message has arrived completely, at most until `until_s`; return when, and its job."""
        while self._events and self._events[0][0] <= until_s:
            at_s, _, left, hop = heapq.heappop(self._events)
            if left:
                sent_s = max(at_s, self._free_s[hop.wire]) + hop.send_s
                self._free_s[hop.wire] = sent_s
                self._push(sent_s + hop.latency_s, left - 1, hop)
                continue
            self._under_way -= 1
            if self._line:
                self.start(at_s, *self._line.popleft())
            return at_s, hop.job
        return None

    def _push(self, at_s: float, left: int, hop: _Hop) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, left, hop))


@dataclass(frozen=True, slots=True)
class _Hop:
    job: int
    wire: str
    send_s: float
    latency_s: float


def _check(
    jobs: Sequence[Job], links: Mapping[str, Link], compute_s: float, backward_s: float, stolen: float, at_once: int
) -> None:
    """Refuse what cannot be simulated."""
    if not 0 <= backward_s <= compute_s < math.inf or not 0 <= stolen <= 1 or at_once < 1:
        raise ValueError(
            "wanted 0 <= backward_s <= compute_s, 0 <= stolen <= 1 and at_once from 1, got "
            f"backward_s {backward_s}, compute_s {compute_s}, stolen {stolen}, at_once {at_once}"
        )
    for name, link in links.items():
        if not (0 <= link.latency_s < math.inf and link.bytes_per_s > 0):
            raise ValueError(f"links[{name!r}]: wanted a latency from 0 and a rate above 0, got {link}")
    for number, job in enumerate(jobs):
        if not all(0 <= seconds < math.inf for seconds in (job.ready_s, *job.turns)):
            raise ValueError(f"job {number}: wanted seconds from 0, got ready_s {job.ready_s}, turns {job.turns}")
        if len(job.turns) != len(job.messages) + 1:
            raise ValueError(f"job {number}: wanted {len(job.messages) + 1} turns, got {len(job.turns)}")
        for message in job.messages:
            if message.wire not in links or message.nbytes < 0 or message.hops < (1 if message.nbytes else 0):
                raise ValueError(f"job {number}: wanted hops for the bytes, on a wire of {[*links]}, got {message}")
