"""Passes: a schedule becomes a schedule with more actions in it. Order among the old ones never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.schedule import Schedule
from gossamer.spec.action import Action, Op


def with_reduce(schedule: Schedule) -> Schedule:
    """REDUCE_GRADS of each stage right after its last backward."""
    return replace(schedule, ranks=tuple(tuple(_reduced(row)) for row in schedule.ranks))


def _reduced(row: tuple[Action, ...]) -> Iterator[Action]:
    last = {action.stage: place for place, action in enumerate(row) if action.op in (Op.B, Op.B_WEIGHT)}
    for place, action in enumerate(row):
        yield action
        if last.get(action.stage) == place:
            yield Action(Op.REDUCE_GRADS, action.stage)


def with_recompute(schedule: Schedule) -> Schedule:
    """Nothing but its input is kept of a micro-batch from F on; RECOMPUTE right before its backward makes it again."""
    return replace(schedule, ranks=tuple(tuple(_recomputed(row)) for row in schedule.ranks))


def _recomputed(row: tuple[Action, ...]) -> Iterator[Action]:
    for action in row:
        if action.op in (Op.B, Op.B_INPUT):
            yield Action(Op.RECOMPUTE, action.stage, action.batch)
        yield action


def with_split_backward(schedule: Schedule) -> Schedule:
    """Every B as B_INPUT, after which the stage before can go on, and B_WEIGHT."""
    return replace(schedule, ranks=tuple(tuple(_split(row)) for row in schedule.ranks))


def _split(row: tuple[Action, ...]) -> Iterator[Action]:
    for action in row:
        parts = (Op.B_INPUT, Op.B_WEIGHT) if action.op is Op.B else (action.op,)
        yield from (replace(action, op=op) for op in parts)


def spread(
    straight: Callable[[int], Schedule], groups: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]]
) -> Schedule:
    """Stages on several ranks each: `groups[stage]` are these, `dealt[stage][batch]` is the one of a micro-batch.

    `straight(n)` is a schedule of n stages, stage s on rank s. Each stage has the order of one that is followed by as
    many as `_following` says, and of that order each rank keeps what is its own. So actions of a legal schedule are
    left out, nothing else: no ring of waits can come of it.
    """
    following = _following(groups)
    long = straight(following[0] + 1)
    assert long.placement == tuple(range(following[0] + 1)), "stage s on rank s"
    found: dict[int, tuple[Action, ...]] = {}
    for stage, (group, whose) in enumerate(zip(groups, dealt, strict=True)):
        row = [replace(action, stage=stage) for action in long.ranks[following[0] - following[stage]]]
        found.update({r: tuple(a for a in row if a.batch < 0 or whose[a.batch] == r) for r in group})
    return replace(
        long,
        ranks=tuple(found[rank] for rank in range(len(found))),
        placement=tuple(group[0] for group in groups),
        dealt=tuple(tuple(whose) for whose in dealt),
    )


def _following(groups: Sequence[Sequence[int]]) -> list[int]:
    """Per stage, by how many micro-batches all its ranks together must be ahead of its backwards: each of them by the
    same number, and together by no fewer than the next stage's ranks have under way.
    """
    under_way, found = 0, []
    for group in reversed(groups):
        ahead = len(group) * -(-under_way // len(group))
        found.append(ahead)
        under_way = ahead + len(group)
    return found[::-1]


def with_transfers(schedule: Schedule) -> Schedule:
    """A send right after what makes a tensor another rank needs, a receive right before what needs it.

    Between two ranks, receives keep the order of the sends: a receive takes those before it along, which cost no more
    waiting since they were sent earlier. Stages that follow each other on one rank hand over without a transfer.
    """
    sent = tuple(tuple(_with_sends(schedule, row)) for row in schedule.ranks)
    orders: dict[tuple[int, int], list[Action]] = {}  # (from, to) -> receives, in the order of the sends
    for rank, row in enumerate(sent):
        for receive in (received for action in row if (received := matching_receive(action)) is not None):
            orders.setdefault((rank, schedule.rank_of(receive.stage, receive.batch)), []).append(receive)
    rows = tuple(tuple(_with_receives(schedule, row, orders)) for row in sent)
    return replace(schedule, ranks=rows)


def matching_receive(action: Action) -> Action | None:
    """The receive that takes what `action` sends; None where it sends nothing."""
    match action.op:
        case Op.SEND_F:
            return Action(Op.RECV_F, action.stage + 1, action.batch)
        case Op.SEND_B:
            return Action(Op.RECV_B, action.stage - 1, action.batch)
        case _:
            return None


def _with_sends(schedule: Schedule, row: tuple[Action, ...]) -> Iterator[Action]:
    needs = Dependencies.of(schedule)
    for action in row:
        yield action
        stage, batch = action.stage, action.batch
        if action.op is Op.F and schedule.crosses(stage, batch):
            yield Action(Op.SEND_F, stage, batch)
        if schedule.crosses(stage - 1, batch) and action == needs.gradient(stage, batch):
            yield Action(Op.SEND_B, stage, batch)


def _with_receives(
    schedule: Schedule, row: tuple[Action, ...], orders: dict[tuple[int, int], list[Action]]
) -> Iterator[Action]:
    for action in row:
        for receive in _inputs(schedule, action):
            source = schedule.rank_of(receive.stage + (-1 if receive.op is Op.RECV_F else 1), receive.batch)
            queue = orders[source, schedule.rank_of(action.stage, action.batch)]
            while receive in queue:
                yield queue.pop(0)
        yield action


def _inputs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The receive that `action` needs, if its input is made on another rank."""
    stage, batch = action.stage, action.batch
    if action.op is Op.F and schedule.crosses(stage - 1, batch):
        yield Action(Op.RECV_F, stage, batch)
    if action.op in (Op.B, Op.B_INPUT) and schedule.crosses(stage, batch):
        yield Action(Op.RECV_B, stage, batch)
