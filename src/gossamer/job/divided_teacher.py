"""One stage of a teacher that no machine holds: found and cut as a model that trains in stages, without its gradients.

Every stage's process traces the model without memory for its weights, finds the same cuts, and reads the weights of its
own part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.job.found_model import weights_at
from gossamer.job.found_teacher import FoundTeacher, place_of, with_tokenizer
from gossamer.job.teacher_facts import digest_of, facts_of, joined_digest
from gossamer.job.trained_run import read_source
from gossamer.loss.inputs.model_output import logits_of
from gossamer.model.forward_adapter import caller_of
from gossamer.model.source import ModelSource
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.dataflow import DataFlow, hollow
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.split_error import in_words_of
from gossamer.model.split.split_points import SplitPoints, StageSpec, balanced_split, canonical_names, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.unit_config import check_open
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.split_choice import given_split
from gossamer.run.remote_teacher.messages import Facts, TeacherPart
from gossamer.run.remote_teacher.served import ServedTeacher
from gossamer.run.remote_teacher.stage import TEACHER, PlaceBefore, TeacherStage
from gossamer.spec.errors import bad_input

_DIGITS = 6  # of a number of stages
_TOKENS = 8  # of the rows that the first trace runs on


@dataclass(frozen=True, slots=True)
class AskedStage:
    """A stage that is asked for: number `stage`, from 1, of `stages`, cut before the units `cuts` (none: by bytes)."""

    stage: int
    stages: int
    cuts: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, written: str, cuts: str = "") -> AskedStage:
        """Return what I/N and a list of units stand for. Raises BadInput."""
        first, slash, last = written.partition("/")
        fits = slash and all(one.isascii() and one.isdecimal() and len(one) <= _DIGITS for one in (first, last))
        if not fits or not 1 <= int(first) <= int(last):
            raise bad_input(
                wanted="the number of a stage, from 1, and how many there are, such as 1/2",
                got=repr(written),
                do="write --stage 1/2 for the first of two, and 2/2 for the other one",
                key="--stage",
            )
        named = [one.strip() for one in cuts.split(",")] if cuts else []
        return cls(int(first), int(last), tuple(int(one) if one.isdecimal() else one for one in named))


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedTeacher:
    """One stage of a teacher, with its own weights alone. `facts`: of the whole, but for `digest`, that of the part."""

    module: nn.Module
    stage: StageModule
    outline: nn.Module
    cuts: SplitPoints
    part: TeacherPart
    facts: Facts
    digest: float
    held_bytes: int
    whole_bytes: int
    remarks: tuple[str, ...] = ()

    def served(self, device: torch.device, before: PlaceBefore | None) -> ServedTeacher:
        """Return what answers the next stage, or students. `before`: where the stage before is."""
        digest = self.digest if before is None else joined_digest(self.digest, int(before.digest, 16))
        facts = self.facts.model_copy(update={"digest": f"{int(digest):012x}", "part": self.part})
        stage = TeacherStage(
            part=self.part, stage=self.stage, outline=self.outline, cuts=self.cuts, device=device, before=before
        )
        return ServedTeacher(self.module, facts, device, stage)


def find_stage(written: str, asked: AskedStage, device: torch.device, *, key: str = "train.loss") -> DividedTeacher:
    """Load one stage of the teacher in the folder of a Hugging Face model or of a run, or in a GGUF file.

    key: what names the teacher. Raises BadInput, also for a teacher that cannot be divided so.
    """
    origin, found = _source_of(place_of(written, key=key), key)
    with in_words_of(TEACHER):
        return _stage_of(origin, found, asked, device)


def _source_of(place: Path, key: str) -> tuple[ModelSource, Callable[[nn.Module], FoundTeacher]]:
    origin = weights_at(place)
    if origin is not None:
        positions = origin.positions()
        return origin, lambda module: with_tokenizer(
            FoundTeacher(module=module, tokenizer=None, positions=positions), place, key=key
        )
    run = read_source(place)
    return run.origin, lambda module: FoundTeacher(
        module=module, tokenizer=run.tokenizer, positions=run.origin.positions()
    )


def _stage_of(
    origin: ModelSource, found: Callable[[nn.Module], FoundTeacher], asked: AskedStage, device: torch.device
) -> DividedTeacher:
    provider = OriginSource(origin, 0)
    outline = provider.outline()
    _put(outline, frozenset(), device)
    check_open(outline, TEACHER.stages)
    construction = provider.construction()
    if construction.shared or construction.computed:
        named = [*(" and ".join(sorted(one)) for one in construction.shared), *map(".".join, construction.computed)]
        raise bad_input(
            wanted="a teacher whose parameters have memory of their own, and are computed from no other ones",
            got=f"one with {', '.join(named[:3])}",
            do="serve the teacher whole, or build it otherwise (head.weight = embed.weight for tied ones)",
            key=TEACHER.stages,
        )
    length = min(_TOKENS, origin.positions() or _TOKENS)
    example = {"input_ids": torch.zeros(1, length, dtype=torch.int64, device=device)}
    flow = InputVariants(outline, _logits, SplitPoints(())).flow(example, training=False)
    cuts = _cuts(flow, outline, asked)
    parts = stage_specs(outline, flow, cuts, {})
    mine = parts[asked.stage - 1]
    facts = facts_of(found(outline))
    whole_bytes = sum(one.numel() * one.element_size() for one in outline.parameters())
    own = _first_held(parts, mine, canonical_names(outline).values())
    module = provider.part(mine.holds).eval().requires_grad_(False)
    digest = digest_of(module, own)
    _put(module, mine.holds, device)
    stage = StageModule(module, flow, mine)
    return DividedTeacher(
        module=module,
        stage=stage,
        outline=outline,
        cuts=cuts,
        part=TeacherPart(stage=asked.stage, stages=asked.stages, cuts=cuts.first, source=origin.fingerprint()),
        facts=facts,
        digest=digest,
        held_bytes=held_bytes(module),
        whole_bytes=whole_bytes,
        remarks=_remarks(construction.reason, sorted(provider.read_whole)),
    )


def _cuts(flow: DataFlow, outline: nn.Module, asked: AskedStage) -> SplitPoints:
    """Return the cuts that are asked for; else those that give all stages as equal bytes as whole units allow."""
    if asked.cuts:
        return given_split(asked.cuts, asked.stages, flow, outline)
    return balanced_split(flow, asked.stages, costs={call.unit: float(call.parameter_bytes) for call in flow.calls})


def _remarks(built: str, read: Sequence[str]) -> tuple[str, ...]:
    """Return what is said where the whole model was in memory. `built`: why; `read`: tensors that no file names."""
    remarks = [f"it was built {built}, and then given back"] if built else []
    if read:
        many = f" and {len(read) - 1} more" if len(read) > 1 else ""
        remarks.append(f"the whole model was read, and then given back: no file has {read[0]}{many} by that name")
    return tuple(remarks)


def _first_held(parts: Sequence[StageSpec], mine: StageSpec, names: Collection[str]) -> frozenset[str]:
    """Return the tensors that a stage holds and none before it: those whose digests it adds."""
    before = frozenset[str]().union(*(part.holds for part in parts[: mine.stage]))
    return mine.holds.intersection(names) - before


def _put(module: nn.Module, holds: frozenset[str], device: torch.device) -> None:
    """Move a module to a device; parameters that are not in `holds` have no memory there either."""
    for name, parameter in module.named_parameters():
        if name in holds:
            parameter.data = parameter.data.to(device)
        elif parameter.device != device:
            parameter.data = hollow(tuple(parameter.shape), parameter.dtype, device, fill=0.0)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def held_bytes(module: nn.Module) -> int:
    """Return the memory that the parameters of a stage's module have, whichever stage they are of."""
    own = (one.untyped_storage() for one in module.parameters() if not isinstance(one, AbsentTensor))
    return sum({one.data_ptr(): one.nbytes() for one in own}.values())


def _logits(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return logits_of(caller_of(module, list(batch))(module, batch), dims=3, shape="of the teacher")
