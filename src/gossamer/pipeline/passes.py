"""Schedule passes: each adds actions to a schedule. The order of the existing actions never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gossamer.pipeline.dependencies import Dependencies
from gossamer.pipeline.schedule import Schedule
from gossamer.spec.action import Action, Op


def with_reduce(schedule: Schedule) -> Schedule:
    """Add REDUCE_GRADS of each stage right after its last backward."""
    return replace(schedule, ranks=tuple(tuple(_reduced(row)) for row in schedule.ranks))


def _reduced(row: tuple[Action, ...]) -> Iterator[Action]:
    last = {action.stage: place for place, action in enumerate(row) if action.op in (Op.B, Op.B_WEIGHT)}
    for place, action in enumerate(row):
        yield action
        if last.get(action.stage) == place:
            yield Action(Op.REDUCE_GRADS, action.stage)


def with_recompute(schedule: Schedule) -> Schedule:
    """Add RECOMPUTE right before every backward.

    From F until then, a stage keeps only the input of a micro-batch.
    """
    return replace(schedule, ranks=tuple(tuple(_recomputed(row)) for row in schedule.ranks))


def _recomputed(row: tuple[Action, ...]) -> Iterator[Action]:
    for action in row:
        if action.op in (Op.B, Op.B_INPUT):
            yield Action(Op.RECOMPUTE, action.stage, action.batch)
        yield action


def with_split_backward(schedule: Schedule) -> Schedule:
    """Split every B into B_INPUT, after which the previous stage can continue, and B_WEIGHT."""
    return replace(schedule, ranks=tuple(tuple(_split(row)) for row in schedule.ranks))


def _split(row: tuple[Action, ...]) -> Iterator[Action]:
    for action in row:
        parts = (Op.B_INPUT, Op.B_WEIGHT) if action.op is Op.B else (action.op,)
        yield from (replace(action, op=op) for op in parts)


def spread(
    straight: Callable[[int], Schedule], groups: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]]
) -> Schedule:
    """Return a schedule of stages on several ranks each, from one rank per stage.

    `straight(n)` returns a schedule of n stages, stage s on rank s. `groups[stage]` are the ranks of a stage,
    `dealt[stage][batch]` is the rank of a micro-batch. Each stage takes the action order of the stage of `straight`
    that has `_following` stages after it. Each rank keeps its own micro-batches of that order. So actions of a legal
    schedule are dropped and nothing else changes: no deadlock can result.
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
    """Return for each stage by how many micro-batches its ranks together must be ahead of its backwards.

    Each of the ranks is ahead by the same number, and together by no fewer than the next stage's ranks have in flight.
    """
    under_way, found = 0, []
    for group in reversed(groups):
        ahead = len(group) * -(-under_way // len(group))
        found.append(ahead)
        under_way = ahead + len(group)
    return found[::-1]


def with_transfers(schedule: Schedule) -> Schedule:
    """Add a send right after an action whose result another rank needs, and a receive right before its use there.

    Between two ranks, receives keep the order of the sends: a receive is preceded by all earlier ones, which adds no
    waiting because they were sent earlier. Successive stages on one rank need no transfer.
    """
    sent = tuple(tuple(_with_sends(schedule, row)) for row in schedule.ranks)
    orders: dict[tuple[int, int], list[Action]] = {}  # (from, to) -> receives, in the order of the sends
    for rank, row in enumerate(sent):
        for receive in (received for action in row if (received := matching_receive(action)) is not None):
            orders.setdefault((rank, schedule.rank_of(receive.stage, receive.batch)), []).append(receive)
    rows = tuple(tuple(_with_receives(schedule, row, orders)) for row in sent)
    return replace(schedule, ranks=rows)


def matching_receive(action: Action) -> Action | None:
    """Return the receive that matches the send `action`, None where it is no send."""
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
