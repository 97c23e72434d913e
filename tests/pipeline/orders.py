"""Schedules written out by hand: what the makers of later rooms must agree with."""

from __future__ import annotations

from gossamer.pipeline.passes import with_reduce
from gossamer.pipeline.schedule import Schedule, StageCosts
from gossamer.spec.action import Action, Op

F, B, R = Op.F, Op.B, Op.RECOMPUTE


def listed(name: str, rows: list[str], placement: tuple[int, ...], microbatches: int, **more: bool) -> Schedule:
    """From rows such as "0F0 0B0 0RG"."""
    ranks = tuple(tuple(parse(word) for word in row.split()) for row in rows)
    return Schedule(name=name, ranks=ranks, placement=placement, microbatches=microbatches, **more)


def parse(word: str) -> Action:
    """What `str(action)` prints, read back."""
    stage = word[: len(word) - len(word.lstrip("0123456789"))]
    kind = word[len(stage) :].rstrip("0123456789")
    return Action(Op(kind), int(stage), int(word[len(stage) + len(kind) :] or -1))


def straight(name: str, rows: list[list[Action]], microbatches: int) -> Schedule:
    """Stage s on rank s."""
    ranks = tuple(tuple(row) for row in rows)
    return with_reduce(Schedule(name=name, ranks=ranks, placement=tuple(range(len(rows))), microbatches=microbatches))


def gpipe(p: int, m: int) -> Schedule:
    rows = [[Action(F, s, b) for b in range(m)] + [Action(B, s, b) for b in reversed(range(m))] for s in range(p)]
    return straight("gpipe", rows, m)


def one_f_one_b(p: int, m: int, *, early_recompute: tuple[int, ...] = ()) -> Schedule:
    """`early_recompute`: stages whose recompute does not wait for the gradient."""
    rows = []
    for s in range(p):
        warm = min(m, p - s - 1)
        row = [Action(F, s, b) for b in range(warm)]
        for b in range(m):
            row += [Action(F, s, b + warm)] if b + warm < m else []
            row += [Action(R, s, b)] if s in early_recompute else []
            row += [Action(B, s, b)]
        rows.append(row)
    return straight("1f1b", rows, m)


def split_1f1b(p: int, m: int) -> Schedule:
    """1F1B with every B written as B_INPUT and B_WEIGHT."""
    both = {B: (Op.B_INPUT, Op.B_WEIGHT)}
    rows = [
        [Action(op, a.stage, a.batch) for a in row if a.op in (F, B) for op in both.get(a.op, (a.op,))]
        for row in one_f_one_b(p, m).ranks
    ]
    return straight("split 1f1b", rows, m)


def vee(m: int) -> Schedule:
    """Four stages down and up again over two ranks; stages 1 and 2 are neighbors on rank 1."""
    rows = [
        " ".join(f"0F{b}" for b in range(m)) + " " + " ".join(f"3F{b} 3B{b}" for b in range(m)),
        " ".join(f"1F{b} 2F{b}" for b in range(m)) + " " + " ".join(f"2B{b} 1B{b}" for b in range(m)),
    ]
    rows[0] += " " + " ".join(f"0B{b}" for b in range(m))
    return with_reduce(listed("vee", rows, (0, 1, 1, 0), m))


def unit_costs(stages: int, *, b: float = 2.0) -> list[StageCosts]:
    """F = 1, B = 2 = B_INPUT + B_WEIGHT, recompute 1; one byte per micro-batch."""
    seconds = {F: 1.0, B: b, Op.B_INPUT: 1.0, Op.B_WEIGHT: 1.0, R: 1.0}
    return [StageCosts(seconds=seconds, live_bytes=1) for _ in range(stages)]
