"""The proof at the start of a run: check before the first step that the layout has the gradients of one process.

`train.prove` in the configuration says when to check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.comm.channel import gathered
from gossamer.comm.comm_thread import CommThread
from gossamer.model.precision import FP32, precision_of
from gossamer.model.split.split_points import canonical_names
from gossamer.partition.rank_model import Planned
from gossamer.proof.cache import digest_of, is_kept, keep
from gossamer.proof.compare import compared
from gossamer.proof.divided import DividedSide
from gossamer.proof.fingerprints import TensorNames
from gossamer.proof.keepalive import Keepalive
from gossamer.proof.memory import activation_bytes
from gossamer.proof.one_process import OneProcess
from gossamer.proof.report import layout_of, line_of, refusal_of, warnings_of
from gossamer.proof.time_limit import NotProved, ProofTimeLimit
from gossamer.proof.trials import TrialSet, question_of
from gossamer.recipe import PlanMethods
from gossamer.run.engine import engine_of
from gossamer.run.parts import Parts
from gossamer.run.resources import memory
from gossamer.run.step_runner import ModelRuntime
from gossamer.spec import records
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.plan import Plan
from gossamer.spec.units import show_gib

_KEY = "train.prove"
_LITTLE = 4  # activations are estimated only for a model of more than 1/4 of the free memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Proving:
    """One rank's part in the parity proof of the gradients. All ranks call `prove` between the same two collectives."""

    planned: Planned
    parts: Parts  # nothing in it is built or run
    pump: CommThread
    sink: Callable[[records.Record], None]
    at: Callable[[int, str], None]
    asked_to_stop: Callable[[], bool]
    described: str = ""  # the model, for people
    data: str = ""  # fingerprint of the training data
    file: Path | None = None  # rank 0's cache of the proof

    def prove(self) -> None:
        """Prove the layout if `train.prove` asks for it, and write the outcome to `sink`.

        Raises BadInput if the layout differs from one process, or if a proof is required and not possible; Interrupted;
        PeerLost.
        """
        if not is_asked(self.parts):
            return
        began = time.perf_counter()
        self.at(0, "prove")
        digest = digest_of(self.parts, self.described, self.data)
        if self._is_known(digest):
            self.sink(records.Proof(outcome="kept", message="as an earlier start of this run has found"))
            return
        try:
            record = self._proved(began)
        except NotProved as error:
            record = records.Proof(outcome="not proved", message=str(error), seconds=time.perf_counter() - began)
            if self.parts.config.train.prove == "always":
                self.sink(record)
                raise bad_input(
                    wanted=f"a proof that {layout_of(self.parts.plan)} compute the gradients of one process",
                    got=f"no proof: {error}",
                    do=f"set {_KEY}: auto to train without a proof",
                    key=_KEY,
                ) from None
            said = f"not proved: that {layout_of(self.parts.plan)} compute the gradients of one process, as {error}"
            self.sink(records.Event(level="warning", message=said, step=0))
        except BadInput as error:
            self.sink(records.Proof(outcome="failed", message=error.message, seconds=time.perf_counter() - began))
            raise
        self.sink(record)
        if record.outcome == "equal":
            self._keep(digest, record.message)

    def _is_known(self, digest: str) -> bool:
        mine = self.file is not None and is_kept(self.file, digest)
        return bool(gathered(self.pump.channel, [float(mine)])[0, 0])

    def _keep(self, digest: str, message: str) -> None:
        if self.file is None or self.pump.channel.rank:
            return
        try:
            keep(self.file, digest, message)
        except OSError as error:
            said = f"cannot write {self.file} ({error.strerror}): the next start of this run repeats the proof"
            self.sink(records.Event(level="warning", message=said, step=0))

    def _proved(self, began: float) -> records.Proof:
        parts, channel = self.parts, self.pump.channel
        company = Keepalive(channel, 0, self.asked_to_stop)
        company = replace(company, speaker=self._roomiest(company))
        question, names = self._question(), names_of(parts)
        run_s = parts.config.train.seconds

        def pulse_of() -> Callable[[], None]:
            patience = ProofTimeLimit(run_s=run_s, pieces=2 * question.microbatches * len(question.rounds))
            return lambda: _beat(company, patience)

        alone = OneProcess(engine=self._whole, names=names, pulse=pulse_of, units=parts.units)
        layout = DividedSide(parts=self._part, names=names, pump=self.pump, at=self.at)
        verdict, cost = compared(company, alone, layout, question, parts.objective)
        seconds = time.perf_counter() - began
        if verdict.unsteady or verdict.faults:
            raise refusal_of(verdict, parts.plan)
        for said in warnings_of(verdict):
            self.sink(records.Event(level="warning", message=said, step=0))
        return records.Proof(
            outcome="equal",
            message=line_of(verdict, cost, question, parts.plan, parts.config, seconds),
            losses=verdict.losses,
            tensors=verdict.tensors,
            proved=verdict.proved,
            idle=verdict.idle,
            within=verdict.within,
            within_coarse=verdict.within_coarse,
            microbatches=cost.microbatches,
            builds=cost.builds,
            alone_s=cost.alone_s,
            divided_s=cost.divided_s,
            seconds=seconds,
        )

    def _question(self) -> TrialSet:
        config = self.parts.config
        return question_of(
            self.parts.train,
            self.parts.plan,
            self.parts.objective,
            seed=config.train.seed,
            steps=config.train.steps,
            precision=precision_of(config.train.precision),
            exact=FP32,
        )

    def _roomiest(self, company: Keepalive) -> int:
        """Return the rank with the most free memory. Raises NotProved if the unsharded model does not fit there."""
        rank, free = company.most(float(self._free_bytes()))
        parameters = list(self.parts.outline.parameters())
        needed = sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in parameters)
        if needed > free / _LITTLE and self.parts.cut is not None:
            needed += activation_bytes(self.parts.cut.ways, self._question().rounds[0])
        if needed > free:
            raise NotProved(
                f"one process takes {show_gib(needed)} for parameters, gradients and the activations of a micro-batch, "
                f"and {show_gib(int(free))} are free on rank {rank}, the rank with the most free memory"
            )
        return rank

    def _free_bytes(self) -> int:
        if self.parts.device.type == "cuda":
            return torch.cuda.mem_get_info(self.parts.device)[0]
        return memory()[1]

    def _whole(self) -> ModelRuntime:
        parts = self.parts
        module = self.planned.whole()
        plan = parts.plan.model_copy(update={"savers": ()})  # what they change is compared with plain training
        return engine_of(replace(parts, module=module, plan=plan, config=_plainly(parts.config)))

    def _part(self) -> Parts:
        held = self.planned.part()
        plan = of_proof(self.parts.plan)
        return replace(self.parts, module=held.module, cut=held.cut, plan=plan, config=_plainly(self.parts.config))


def is_asked(parts: Parts) -> bool:
    """Return whether the configuration asks for a proof of this layout."""
    config, plan = parts.config, parts.plan
    if config.train.prove == "never":
        return False
    together = PlanMethods.of(plan).sync
    if together.probe is not None:
        return False
    if config.train.prove == "always":
        return True
    if plan.axes.in_stages:
        return True
    is_uneven = len(set(plan.rows)) > 1 or len(set(plan.microbatches)) > 1
    return plan.axes.is_replicated and together.loop is None and (is_uneven or _has_state(parts.outline))


def of_proof(plan: Plan) -> Plan:
    """Return the plan of the proof: the same stages and replicas, with as many micro-batches per replica as a proof has
    and without compression, sharding or local-update training.
    """
    count = max([2, *map(len, plan.stage_ranks)])
    replicas = plan.mesh.replica
    return plan.model_copy(
        update={
            "rows": (count,) * replicas,
            "microbatches": (count,) * replicas,
            "activation_compression": "none",
            "exchange": "dense",
            "sync": "every_step",
            "sharding": "none",
        }
    )


def names_of(parts: Parts) -> TensorNames:
    """Return the names of the outline's parameters and buffers in backward order."""
    module = parts.outline
    named: Mapping[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    order = list(dict.fromkeys(canonical_names(module).values()))
    assert set(order) == set(named), "canonical names are the first ones"
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    backward = order[::-1]
    buffers = dict(module.named_buffers())
    return TensorNames(
        values=tuple(backward),
        trained=tuple(n for n in backward if n in trained),
        buffers=tuple(n for n in backward if n in buffers),
        eps=tuple(_eps(named[n]) for n in backward if n in trained),
    )


def _has_state(module: nn.Module) -> bool:
    """Return whether the module has persistent buffers; others are derived from constants (angles, masks)."""
    return any(
        buffer is not None and name not in owner._non_persistent_buffers_set
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    )


def _eps(tensor: Tensor) -> float:
    """Return the rounding unit of the dtype a gradient is summed in; at least that of float32, the dtype of rows."""
    return max(torch.finfo(tensor.dtype).eps, torch.finfo(torch.float32).eps)


def _plainly(config: RunConfig) -> RunConfig:
    """Return the configuration without compilation; each round sets its own precision."""
    model = config.model.model_copy(update={"compile": False})
    return config.model_copy(update={"model": model})


def _beat(company: Keepalive, patience: ProofTimeLimit) -> None:
    patience.pulse()
    company.pulse()
