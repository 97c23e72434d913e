"""The memory of pipeline stages: what they share, and whether all of it fits."""

from __future__ import annotations

import torch

from gossamer.comm.message import ProcessGroups
from gossamer.model.split.constructor_state import (
    ConstructorState,
)
from gossamer.model.split.split_points import StageSpec
from gossamer.partition.request import PartitionRequest
from gossamer.run.resources import memory
from gossamer.run.staged_model import StagedModel
from gossamer.sharding import ElementBytes, RowPartition, bytes_of, holdings, shapes_of
from gossamer.spec.errors import bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_gib

_UNDIVIDED = RowPartition(ProcessGroups.flat(1))  # every rank of a stage holds all of it


def check_shared_memory(construction: ConstructorState, cut: StagedModel) -> None:
    """Raise BadInput if tensors that share memory lie in different stages: one would not see the other's writes."""
    for group in construction.shared:
        at = {name: frozenset(p.stage for p in cut.parts if name in p.holds) for name in sorted(group)}
        if len(set(at.values())) > 1:
            raise bad_input(
                wanted="tensors that share memory in one stage",
                got=" and ".join(f"{name} (stage {', '.join(map(str, sorted(s))) or '-'})" for name, s in at.items()),
                do="tie parameters by assigning the parameter itself (head.weight = embed.weight), not its .data; or "
                "move the split point",
                key="plan.cuts",
            )


def check_room(plan: Plan, cut: StagedModel, asked: PartitionRequest) -> None:
    """Check that the training states of all stages on a GPU, or on a machine, fit its memory. Raises BadInput."""
    on_gpu = asked.device.type == "cuda"
    there = torch.cuda.get_device_properties(asked.device).total_memory if on_gpu else memory()[0]
    sizes = {p.stage: state_bytes_of(cut, p) for p in cut.parts}
    held = [cut.stages_at(plan.axes.place(rank)[1]) for rank in range(asked.ranks)]
    together = 1 if on_gpu else asked.local_ranks
    for first in range(0, asked.ranks, together):  # a machine's ranks follow each other
        here = [stage for stages in held[first : first + together] for stage in stages]
        needed = sum(sizes[stage] for stage in here)
        if needed > there:
            stage = max(here, key=lambda stage: sizes[stage])
            beside, others = needed - sizes[stage], f" of {len(here) - 1} other stages" if len(here) > 1 else ""
            raise bad_input(
                wanted=f"memory for stage {stage} (from {cut.ways.cuts.first[stage]}): {show_gib(sizes[stage])} of "
                f"parameters, gradients and optimizer state{f', beside {show_gib(beside)}{others}' if others else ''}",
                got=f"{show_gib(there)} on the {'GPU' if on_gpu else 'machine'} of ranks {first} to "
                f"{min(first + together, asked.ranks) - 1}: {show_gib(needed - there)} too little",
                do="split the model into more stages (plan.mesh.pipe), use more machines, or a smaller model.dtype",
                key="plan.mesh.pipe",
            )


def state_bytes_of(cut: StagedModel, part: StageSpec) -> int:
    """Return the bytes of a stage's parameters, gradients and optimizer states.

    Gradients and two optimizer slots are counted in float32.
    """
    held = {name: p for name, p in cut.ways.module.named_parameters() if name in part.holds}
    frozen = [name for name, p in held.items() if not p.requires_grad]
    sizes = {name: ElementBytes(kept=p.element_size(), gradient=4, owned=8) for name, p in held.items()}
    return bytes_of(holdings(_UNDIVIDED, shapes_of(held), 0, frozen=frozen).values(), sizes)
