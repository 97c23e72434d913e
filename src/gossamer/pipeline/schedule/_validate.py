"""Checks of the numbers that a pipeline schedule is built for."""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.pipeline.schedule._costs import StageCosts
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_gib


def at_least_one(**counts: int) -> None:
    """Raise BadInput where a count (stages, ranks, micro-batches) is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise bad_input(wanted=f"at least 1 for {name}", got=str(count), do="give a whole number above 0", key=name)


def one_stage_per_rank(name: str, *, stages: int, ranks: int) -> None:
    """Raise BadInput unless there is one stage per rank, for schedules that support no other placement."""
    if stages != ranks:
        raise bad_input(
            wanted=f"as many stages as ranks for the schedule {name}",
            got=f"{stages} stages on {ranks} ranks",
            do=f"split the model into {ranks} stages, or choose a schedule that places several stages on a rank",
            key="plan.pipeline_schedule",
        )


def within(
    live: Sequence[int], costs: Sequence[StageCosts] | None, memory_cap: Sequence[int] | None, *, do: str
) -> None:
    """Raise BadInput unless `live[s]` micro-batches of stage s fit on rank s, where there is a memory limit."""
    if costs is None or memory_cap is None:
        return
    for stage, (count, cost, cap) in enumerate(zip(live, costs, memory_cap, strict=True)):
        needed = count * cost.live_bytes
        if needed > cap:
            raise bad_input(
                wanted=f"memory for the activations of {count} micro-batches of stage {stage} ({show_gib(needed)})",
                got=f"{show_gib(cap)} on rank {stage}, {show_gib(needed - cap)} too little",
                do=do,
                key="plan.pipeline_schedule",
            )
