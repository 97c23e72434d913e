"""A trial: a model in stages trained for a few steps over real processes, as a run trains it, and compared number by
number with the same model in one stage, alone, on the same micro-batches.

The reference leaves what it found in files; each rank looks up there what it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.autotune.plan_groups import levels_of
from gossamer.comm.channel import Channel
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.channel.loopback import LoopbackChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.model.split.input_variants import InputVariants
from gossamer.model.split.split_points import SplitPoints, balanced_split
from gossamer.model.units import block_names
from gossamer.partition.model_provider import OriginSource
from gossamer.partition.rank_model import Planned, planned
from gossamer.partition.request import PartitionRequest
from gossamer.proof.startup import Proving
from gossamer.run.batches import Batches, RankBatch
from gossamer.run.build import build
from gossamer.run.checkpoint_directory import CheckpointDirectory
from gossamer.run.checkpoint_manager import CheckpointManager
from gossamer.run.engine import engine_of
from gossamer.run.parts import Parts
from gossamer.run.start_checks import check_agreement, check_before_start, fingerprint
from gossamer.run.step_runner import ModelRuntime
from gossamer.run.trainer import Trainer
from gossamer.run.trainer_services import TrainerServices
from gossamer.spec import records
from gossamer.spec.config import RunConfig
from zoo.case import Case, Different, Own, loss_of, module_of, short
from zoo.check import BESIDE, NOISE, TOLERANCE
from zoo.inputs import batch_of

STEPS, MICROBATCHES = 3, 4
WIRE_S = 60.0  # an exchange that takes longer has failed
CPU = torch.device("cpu")


class CaseBatches(Batches):
    """Each of the numbered sequences is a micro-batch of two rows; of every other one the first row is padded, where
    the model has a mask."""

    def __init__(self, case: Case) -> None:
        self._form = case.form

    def __len__(self) -> int:
        return STEPS * MICROBATCHES

    def batch(self, indices: np.ndarray[Any, Any]) -> RankBatch:
        (index,) = (int(i) for i in indices)
        return batch_of(self._form, seed=index, padded=index % 2 == 1)

    def text_bytes(self, indices: np.ndarray[Any, Any]) -> int | None:
        return None


@dataclass(frozen=True)
class Trial:
    """What all its ranks are told. `cuts`: first unit of every stage; none where the model is one."""

    case: Case
    cuts: tuple[str, ...]
    schedules: tuple[str, ...]
    folder: Path  # where the reference is, and where the ranks meet
    proofs: tuple[str, ...] = ()  # precisions in which stages are proved before they train

    @property
    def ranks(self) -> int:
        return max(1, len(self.cuts))

    @property
    def config(self) -> RunConfig:
        plan: dict[str, Any] = {
            "mesh": {"pipe": self.ranks},
            "exchange": "dense",
            "pipeline_schedule": self.schedules[0],
        }
        train = {
            "steps": STEPS,
            "batch": MICROBATCHES,
            "accumulate": MICROBATCHES,
            "max_grad_norm": 0.0,
            "optimizer": {"sgd": {"lr": 1e-2, "momentum": 0.9}},
            "lr_schedule": "constant",
            "on_nonfinite": "stop",
        }
        plan |= {"cuts": list(self.cuts)} if self.cuts else {}
        return RunConfig.model_validate({"train": train, "plan": plan})


@dataclass
class Seat:
    """One rank of a trial. Plays one schedule after the other from the same start."""

    parts: Parts
    engine: ModelRuntime
    pump: CommThread
    folder: Path
    proved: dict[str, str] = field(default_factory=dict)  # precision -> what the proof says
    start: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cut = self.parts.cut
        mine = None if cut is None else cut.holds
        self.start = {n: x.detach().clone() for n, x in _state(self.parts.module) if mine is None or n in mine}

    def play(self, schedule: str) -> Iterator[tuple[Trainer, records.Step]]:
        """The trainer after every step."""
        self._begin_again()
        said: list[records.Record] = []
        plan = self.parts.plan.model_copy(update={"pipeline_schedule": schedule})
        trainer = build(replace(self.parts, plan=plan), self.engine, self.pump, _around(self.folder, said))
        for _ in range(STEPS):
            trainer.one_step()
            (step,) = (record for record in said if isinstance(record, records.Step))
            said.clear()
            yield trainer, step
        trainer.replica.close()

    @torch.no_grad()
    def _begin_again(self) -> None:
        parameters = dict(self.parts.module.named_parameters())
        for name, tensor in self.start.items():
            if name in parameters:
                parameters[name].copy_(tensor)
            else:
                owner, _, leaf = name.rpartition(".")
                self.parts.module.get_submodule(owner)._buffers[leaf] = tensor.clone()


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _around(folder: Path, said: list[records.Record]) -> TrainerServices:
    saver = CheckpointManager(
        directory=CheckpointDirectory(path=folder / "unused"), rank=0, sink=said.append, identity={}
    )
    return TrainerServices(sink=said.append, at=lambda step, phase: None, asked_to_stop=lambda: False, saver=saver)


@contextmanager
def seated(trial: Trial, source: OriginSource, rank: int) -> Iterator[Seat]:
    """The way of `gossamer train`, without its probes and its records: each rank builds its own part."""
    parts, model = _planned(trial, source, rank)
    check_before_start(parts)
    pump = CommThread(_channel(trial, parts, rank))
    try:
        check_agreement(pump, {"plan": parts.plan.model_dump_json(), "model": fingerprint(parts.outline)})
        asked = trial.proofs if trial.cuts else ()
        proved = {
            one: _impossible(trial.case, one) or _proved(*_planned(trial, source, rank, one), pump) for one in asked
        }
        held = model.hold()
        parts = replace(parts, module=held.module, cut=held.cut)
        yield Seat(parts, engine_of(parts), pump, trial.folder, proved)
    finally:
        pump.close()
        pump.channel.close()


def _planned(trial: Trial, source: OriginSource, rank: int, precision: str = "fp32") -> tuple[Parts, Planned]:
    """What a rank knows before anything is built."""
    config, data = trial.config, CaseBatches(trial.case)
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
    asked = PartitionRequest(config=config, ranks=trial.ranks, rank=rank, batches=data, objective=Own(), device=CPU)
    model = planned(source, asked)
    outline = model.outline
    parts = Parts(
        module=outline.module,
        objective=Own(),
        train=data,
        validation={},
        config=config,
        plan=model.plan,
        device=CPU,
        cut=outline.cut,
    )
    return parts, model


def _impossible(case: Case, precision: str) -> str:
    """Why plain torch cannot compute the model in that precision either; empty where it can."""
    if precision == "fp32":
        return ""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(module_of(case), batch_of(case.form, seed=0, padded=True)).backward()
    except RuntimeError as error:
        return f"impossible: plain torch: {short(error)}"
    return ""


def _proved(parts: Parts, model: Planned, pump: CommThread) -> str:
    """What `train.prove` says of these stages; raises BadInput where it finds them wrong."""
    said: list[records.Record] = []
    proving = Proving(
        planned=model,
        parts=parts,
        pump=pump,
        sink=said.append,
        at=lambda step, phase: None,
        asked_to_stop=lambda: False,
    )
    proving.prove()
    (proof,) = (one for one in said if isinstance(one, records.Proof))
    return f"{proof.outcome}: {proof.message}"


def _channel(trial: Trial, parts: Parts, rank: int) -> Channel:
    levels = levels_of(parts.plan)
    if trial.ranks == 1:
        return LoopbackChannel(0, levels)
    store = dist.FileStore(str(trial.folder / f"meeting-{trial.ranks}"), trial.ranks)
    return ProcessGroupChannel(Rendezvous(store, rank, levels, interface="lo", timeout_s=WIRE_S))


def cuts_of(case: Case, module: nn.Module, stages: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """For each number of stages, those of equal numbers of blocks."""
    flow = InputVariants(module, loss_of, SplitPoints(())).flow(batch_of(case.form, seed=0, padded=False))
    prices = dict.fromkeys(flow.units, BESIDE) | dict.fromkeys(block_names(module), 1.0)
    return {count: balanced_split(flow, count, costs=prices).first for count in stages}


def refer(trial: Trial, source: OriginSource, rank: int) -> dict[str, Any]:
    """Train in one process and keep the numbers; says which part of the parameters had a gradient."""
    reached: set[str] = set()
    with seated(trial, source, rank) as seat:
        module = seat.parts.module
        sizes = {name: p.numel() for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
        for schedule in trial.schedules:
            _keep(trial, seat, schedule)
    return {
        "reached": round(sum(sizes[n] for n in reached) / sum(sizes.values()), 3),
        "trained": [name for name, p in module.named_parameters() if p.requires_grad],
    }


def _keep(trial: Trial, seat: Seat, schedule: str) -> None:
    gradients, losses, parameters = [], [], {}
    for trainer, step in seat.play(schedule):
        found = {name: g.clone() for name, g in trainer.replica.gradients().items()}
        sick = [name for name, g in found.items() if not bool(torch.isfinite(g).all())]
        if sick or not np.isfinite(step.loss):
            raise Different(f"uncut, the loss is {step.loss}{f', {sick[0]} has a gradient not finite' if sick else ''}")
        gradients.append(found)
        losses.append(step.loss)
        parameters = {name: p.detach().clone() for name, p in trainer.states.params.items()}
    kept = {"gradients": gradients, "losses": losses, "parameters": parameters}
    torch.save(kept, trial.folder / f"{schedule}.pt")


def compare(trial: Trial, source: OriginSource, rank: int) -> dict[str, Any]:
    """Train as one rank among all. Raises Different; says whether all was equal bit for bit, and what it held."""
    exact, sent = True, 0
    digests: dict[str, str] = {}
    with seated(trial, source, rank) as seat:
        assert seat.parts.cut is not None
        shared = seat.parts.cut.parameters_on_several_stages()
        forecast = {k: n for k, n in seat.parts.plan.forecast.wire_bytes.items() if k.startswith(f"{rank}>") and n}
        for schedule in trial.schedules:
            kept = torch.load(trial.folder / f"{schedule}.pt", mmap=True, weights_only=True)
            for number, (trainer, step) in enumerate(seat.play(schedule)):
                where = f"{trial.ranks} stages, {schedule}, step {number + 1}"
                gradients = trainer.replica.gradients()
                exact &= _same_loss(where, step.loss, kept["losses"][number])
                exact &= _same(f"{where}: the gradient of", gradients, kept["gradients"][number])
                digests |= {f"{where}: {n}": _digest(gradients[n]) for n in shared if n in gradients}
                if {k: n for k, n in step.wire_bytes.items() if n} != forecast:
                    raise Different(f"{where}: rank {rank} sent {step.wire_bytes} bytes, forecast {forecast}")
                sent = sum(step.wire_bytes.values())
            exact &= _same(f"{where}: the parameter", trainer.states.params, kept["parameters"])
        built = seat.parts.plan.reasons.get("build", "")
    return {
        "exact": exact,
        "held": list(trainer.states.params),
        "digests": digests,
        "sent": sent,
        "built": built,
        "proved": seat.proved,
    }


def _same_loss(where: str, ours: float, theirs: float) -> bool:
    if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
        raise Different(f"{where}: loss {ours} instead of {theirs}")
    return ours == theirs


def _same(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether bit for bit; raises where not even close."""
    noise = NOISE * max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=0.0)
    exact = True
    for name, mine in ours.items():
        if torch.equal(mine, theirs[name]):
            continue
        exact = False
        error = float((mine - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=noise))
        if not error <= TOLERANCE:
            raise Different(f"{what} {name} is off by {error:.1e} of its largest entry")
    return exact


@torch.no_grad()
def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
