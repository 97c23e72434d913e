"""Prove that a pipeline schedule can run: done when a plan is built, not at step 1000."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.executor import ScheduleBackend, ScheduleDeadlock, execute
from gossamer.pipeline.passes import matching_receive
from gossamer.pipeline.schedule import Schedule
from gossamer.pipeline.schedule._schedule import grid
from gossamer.spec.action import Action, Op
from gossamer.spec.errors import BadInput

WHOLE_STAGE = {Op.GATHER_PARAMS, Op.FREE_PARAMS, Op.REDUCE_GRADS}
REPEATED = {Op.GATHER_PARAMS, Op.FREE_PARAMS}
TRANSFERS = {Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B}
COMPUTES = {Op.F, Op.B, Op.B_INPUT, Op.B_WEIGHT, Op.RECOMPUTE}
FORWARD = {Op.F, Op.SEND_F, Op.RECV_F, Op.GATHER_PARAMS, Op.FREE_PARAMS}  # the others belong to a backward


class IllegalSchedule(BadInput):
    """The error for an illegal schedule; the message shows the action in the grid.

    `rank` and `place`: where the offending action is in `schedule`.
    """

    def __init__(self, said: str, schedule: Schedule, rank: int, place: int) -> None:
        row = schedule.ranks[rank] if rank < len(schedule.ranks) else ()
        where = f"rank {rank}, place {place}" + (f", {row[place]}" if place < len(row) else "")
        lines = grid(schedule.ranks, at=(rank, min(place, max(0, len(row) - 1))))
        head = f"pipeline schedule {schedule.name} cannot run, at {where} (stage, op, micro-batch): {said}"
        super().__init__("\n".join([f"{head}: correct the actions that its make() returns", *lines]))
        self.rank = rank
        self.place = place


def check(schedule: Schedule) -> None:
    """Raise IllegalSchedule unless `schedule` can run to its end and frees all that it holds.

    Every F runs once per micro-batch, and its backward where the schedule trains. Every dependency is fulfilled,
    earlier in the rank's own list or on another rank without deadlock. Every send is received once, in the order of
    sending between two ranks. Parameters are gathered and micro-batches reloaded while used, and nothing is kept at the
    end.
    """
    proof = _Proof(schedule)
    proof.places()
    proof.complete()
    proof.needs_met()
    proof.transfers()
    proof.alive()
    proof.no_deadlock()


@dataclass(slots=True)
class _Proof:
    """The parts of `check`; each relies on those before it."""

    schedule: Schedule
    needs: Dependencies = field(init=False)
    where: dict[Action, tuple[int, int]] = field(init=False)  # of its first occurrence
    own: dict[tuple[int, Action], int] = field(init=False)  # the same, in the list of one rank

    def __post_init__(self) -> None:
        self.needs = Dependencies.of(self.schedule)
        self.where, self.own = {}, {}
        for rank, place, action in self.schedule.actions():
            self.where.setdefault(action, (rank, place))
            self.own.setdefault((rank, action), place)

    def error(self, said: str, at: tuple[int, int]) -> IllegalSchedule:
        return IllegalSchedule(said, self.schedule, *at)

    def places(self) -> None:
        """Stages and micro-batches that exist, on the rank they are placed on, each action once."""
        schedule = self.schedule
        for stage in range(schedule.stages):
            for rank in schedule.ranks_of(stage):
                if not 0 <= rank < len(schedule.ranks):
                    said = f"stage {stage} is placed on rank {rank}, the schedule has {len(schedule.ranks)} ranks"
                    raise self.error(said, (0, 0))
        for rank, place, action in schedule.actions():
            at = (rank, place)
            if not 0 <= action.stage < schedule.stages:
                raise self.error(f"there are {schedule.stages} stages, numbered from 0", at)
            if rank not in schedule.ranks_of(action.stage):
                raise self.error(f"stage {action.stage} is placed on rank {self._ranks(action.stage)}, not {rank}", at)
            if action.op in WHOLE_STAGE and action.batch != -1:
                raise self.error("this op is for the whole stage: its micro-batch must be -1", at)
            if action.op not in WHOLE_STAGE and not 0 <= action.batch < schedule.microbatches:
                raise self.error(f"there are {schedule.microbatches} micro-batches, numbered from 0", at)
            if action.op not in WHOLE_STAGE and schedule.rank_of(action.stage, action.batch) != rank:
                raise self.error(f"rank {schedule.rank_of(action.stage, action.batch)} runs this micro-batch", at)
            if action.op not in REPEATED and self.own[rank, action] != place:
                raise self.error(f"the same action is at place {self.own[rank, action]} too", at)
            if action.op not in FORWARD and not schedule.trains:
                raise self.error("the schedule does not train (trains=False): only forwards are allowed", at)

    def complete(self) -> None:
        """F everywhere; with training B, or B_INPUT and B_WEIGHT, everywhere, and one REDUCE_GRADS per stage."""
        for stage in range(self.schedule.stages):
            for batch in range(self.schedule.microbatches):
                self._demand(Action(Op.F, stage, batch))
                if self.schedule.trains:
                    self._demand_backward(stage, batch)
            if self.schedule.trains:
                self._demand_everywhere(Action(Op.REDUCE_GRADS, stage))

    def _demand_backward(self, stage: int, batch: int) -> None:
        split = [self.where.get(Action(op, stage, batch)) for op in (Op.B_INPUT, Op.B_WEIGHT)]
        whole = self.where.get(Action(Op.B, stage, batch))
        if whole is None and split == [None, None]:
            self._demand(Action(Op.B, stage, batch))
        for at in split:
            if whole is not None and at is not None:
                raise self.error("the same micro-batch has a whole backward too (B): use either B, or I and W", at)
        if whole is None:
            self._demand(Action(Op.B_INPUT, stage, batch))
            self._demand(Action(Op.B_WEIGHT, stage, batch))

    def _demand(self, action: Action) -> None:
        if action not in self.where:
            raise self._missing(action, self.schedule.rank_of(action.stage, action.batch))

    def _demand_everywhere(self, action: Action) -> None:
        for rank in self.schedule.ranks_of(action.stage):
            if (rank, action) not in self.own:
                raise self._missing(action, rank)

    def _missing(self, action: Action, rank: int) -> IllegalSchedule:
        return self.error(f"{action} is missing in the list of rank {rank}", (rank, len(self.schedule.ranks[rank])))

    def _ranks(self, stage: int) -> str:
        return ", ".join(map(str, self.schedule.ranks_of(stage)))

    def needs_met(self) -> None:
        """What an action needs is done by someone, and where that is its own rank, earlier."""
        for rank, place, action in self.schedule.actions():
            for need in self.needs(action):
                at = self.where.get(need)
                if at is None:
                    raise self.error(f"it needs {need}, which no rank runs", (rank, place))
                if at[0] == rank and at[1] > place:
                    raise self.error(f"it needs {need}, which comes after it at place {at[1]}", (rank, place))

    def transfers(self) -> None:
        """None at all (compute actions only), or exactly one send and receive for every tensor that changes rank."""
        present = {a for a in self.where if a.op in TRANSFERS}
        if not present:
            return
        expected = set(self._crossings())
        for action in sorted(present - expected, key=self.where.__getitem__):
            raise self.error("no tensor goes to another rank here, so nothing is sent or received", self.where[action])
        for action in sorted(expected - present, key=lambda a: (a.stage, a.batch, a.op.value)):
            self._demand(action)
        self._in_order()

    def _crossings(self) -> Iterator[Action]:
        for stage in range(self.schedule.stages - 1):
            for batch in range(self.schedule.microbatches):
                if self.schedule.crosses(stage, batch):
                    yield from (Action(Op.SEND_F, stage, batch), Action(Op.RECV_F, stage + 1, batch))
                    if self.schedule.trains:
                        yield from (Action(Op.SEND_B, stage + 1, batch), Action(Op.RECV_B, stage, batch))

    def _in_order(self) -> None:
        """Messages between two ranks arrive as they were sent."""
        sent: dict[tuple[int, int], list[Action]] = {}
        for rank, _, action in self.schedule.actions():
            receive = matching_receive(action)
            if receive is not None:
                sent.setdefault((rank, self.schedule.rank_of(receive.stage, receive.batch)), []).append(receive)
        for (source, to), receives in sent.items():
            wanted = set(receives)
            taken = [a for a in self.schedule.ranks[to] if a in wanted]
            for first, second in zip(receives, taken, strict=True):
                if first != second:
                    said = f"rank {source} sends the tensor of {first} before the tensor of this receive"
                    raise self.error(said, self.where[second])

    def alive(self) -> None:
        """Parameters are there when used and freed at the end; micro-batches that were moved out come back."""
        self._gathered()
        self._offloaded()

    def _gathered(self) -> None:
        gathers = {(rank, a.stage) for rank, a in self.own if a.op in REPEATED}
        there: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, stage) -> where it was gathered
        for rank, place, action in self.schedule.actions():
            at, stage, held = (rank, place), action.stage, (rank, action.stage)
            if action.op in COMPUTES and held in gathers and held not in there:
                raise self.error(f"the parameters of stage {stage} are not gathered", at)
            if action.op is Op.GATHER_PARAMS:
                if held in there:
                    raise self.error(f"the parameters of stage {stage} are already gathered", at)
                there[held] = at
            if action.op is Op.FREE_PARAMS and there.pop(held, None) is None:
                raise self.error(f"the parameters of stage {stage} are freed, but not gathered", at)
        for (_, stage), at in there.items():
            raise self.error(f"the parameters of stage {stage} are never freed", at)

    def _offloaded(self) -> None:
        away: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, batch) -> where it was moved out
        for rank, place, action in self.schedule.actions():
            at, chunk = (rank, place), (action.stage, action.batch)
            if action.op in COMPUTES and chunk in away:
                raise self.error("the activations of this micro-batch were offloaded and not reloaded", at)
            if action.op is Op.OFFLOAD:
                if self.where[self.needs.finished(*chunk)] < at:
                    raise self.error(
                        "the backward of this micro-batch is over, so it has no activations to offload", at
                    )
                away[chunk] = at
            if action.op is Op.RELOAD:
                del away[chunk]

    def no_deadlock(self) -> None:
        """The lists can be worked off together."""
        world = _Order(range(len(self.schedule.ranks)), self.needs)
        try:
            execute(self.schedule, world)
        except ScheduleDeadlock as stuck:
            waits = [
                f"rank {r}: {a} waits for " + ", ".join(str(n) for n in self.needs(a) if n not in world.done)
                for r, a in stuck.waiting.items()
            ]
            action = next(iter(stuck.waiting.values()))
            raise self.error(
                "; ".join(["deadlock, the ranks wait for each other", *waits]), self.where[action]
            ) from None


@dataclass(slots=True)
class _Order(ScheduleBackend):
    """Nothing but what has been done."""

    everyone: Sequence[int]
    needs: Dependencies
    done: set[Action] = field(default_factory=set)

    @property
    def ranks(self) -> Sequence[int]:
        return self.everyone

    def ready_s(self, rank: int, action: Action) -> float | None:
        return 0.0 if all(need in self.done for need in self.needs(action)) else None

    def do(self, rank: int, action: Action) -> None:
        self.done.add(action)
