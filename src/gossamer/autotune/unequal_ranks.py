"""Say which rank the others wait for in every step, and which batch fractions would suit all."""

from __future__ import annotations

from gossamer.comm.channel import Channel, gathered
from gossamer.data.share import share_rows
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_seconds

_UNEQUAL = 1.5  # factor between the slowest rank and the fastest: machines that are alike differ by less at times
_GAIN = 0.8  # of what a step computes: fractions that leave more of it are not worth a setting
_MOST = 16  # fractions to list


def told(channel: Channel, plan: Plan, compute_s: float) -> str:
    """Return which rank is the slowest, and what would help, where it takes 1.5 times what the fastest takes; else "".

    `compute_s`: what this rank computes in a step, alone. The same on all ranks, which call it together.
    """
    seconds = gathered(channel, [compute_s])[:, 0].tolist()
    slowest, fastest = seconds.index(max(seconds)), seconds.index(min(seconds))
    if seconds[slowest] < _UNEQUAL * seconds[fastest]:
        return ""
    said = (
        f"rank {slowest} computes {show_seconds(seconds[slowest])} in a step, rank {fastest} only "
        f"{show_seconds(seconds[fastest])}, and waits for the other"
    )
    if len(plan.rows) != len(seconds) or len(seconds) > _MOST:  # in stages, ranks hold different parts of the model
        return said
    speeds = [rows / rank_s for rows, rank_s in zip(plan.rows, seconds, strict=True)]
    better = share_rows(sum(plan.rows), speeds)
    step_s = max(rows / speed for rows, speed in zip(better, speeds, strict=True))
    if step_s > _GAIN * seconds[slowest]:
        return said
    return f"{said}; with plan.batch_fractions={list(better)} a step would compute {show_seconds(step_s)}"
