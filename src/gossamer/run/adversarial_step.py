"""Adversarial steps: the gradient of the loss on a batch plus that on the same batch, perturbed against the model.

Paper: Liu et al., Concurrent Adversarial Learning for Large-Batch Training, ICLR 2022, arXiv:2106.00221; separate
statistics: Xie et al., CVPR 2020, arXiv:1911.09665.
Equations, with weights w_t and batch x of step t:
    d = clip(alpha direction(grad_x L(w_{t - delay}; x)), -epsilon, epsilon)
    g = grad_w [ L(w_t; x) + L(w_t; x + d) ]
direction: the sign, or the gradient of a row over its norm. Batch normalization keeps statistics of its own for x + d.
All three passes draw the same random numbers. w_{t - 1} are the weights, and buffers, at the beginning of the last
step, also if it was rejected.
State:   with delay 1 the weights and buffers at the beginning of the last step; the second statistics.
Work:    three forwards and backwards (of the first only towards the inputs), one after another. With a companion
         process (`companion`) the first, for the next batch, runs there meanwhile.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.snapshot import Snapshot
from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.recompute import BufferValues, copy_buffers, in_place_of, python_of
from gossamer.pipeline.p2p import StageBoundary
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.shared_tensors import SharedTensors, TensorForm
from gossamer.run.step_algorithm import ReplayedSteps, StepAlgorithm, StepAttempt
from gossamer.run.step_runner import ModelPart, ModelRuntime
from gossamer.run.task import Task
from gossamer.spec.config import AdversarialSection
from gossamer.spec.errors import bad_input
from gossamer.spec.suggest import nearest
from gossamer.sync import StepAgreement

LABELS = "labels"
KEY = "train.adversarial"


@dataclass(frozen=True, slots=True)
class AdversarialState:
    """The state of adversarial training on one rank, changed in place.

    `params`: the trained parameters by name; `previous`, `previous_buffers`: the weights, and the buffers of the
    module, at the beginning of the last step, empty without a delay; `statistics`: the buffers of batch normalization
    for perturbed inputs. All by name; a tensor with several names is there under the first.
    """

    module: nn.Module
    params: Mapping[str, Tensor]
    previous: Mapping[str, Tensor]
    previous_buffers: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]

    @staticmethod
    def of(
        module: nn.Module,
        params: Mapping[str, Tensor],
        settings: AdversarialSection,
        memory: SharedTensors | None = None,
    ) -> AdversarialState:
        """Return the state before the first step: the present weights and buffers, kept in `memory` where given."""
        found = {name: owner._buffers[key] for name, owner, key in _buffers(module) if isinstance(owner, _BatchNorm)}
        statistics = {n: b.detach().clone() for n, b in found.items() if b is not None}
        buffers = dict(module.named_buffers())
        if not settings.delay:
            return AdversarialState(module, params, {}, {}, statistics)
        kept = {n: x.detach().clone() for n, x in {**params, **buffers}.items()} if memory is None else memory.tensors
        state = AdversarialState(
            module, params, {n: kept[n] for n in params}, {n: kept[n] for n in buffers}, statistics
        )
        state.keep()
        return state

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present weights and buffers as those at the beginning of the step that begins now."""
        for name, value in self.previous.items():
            value.copy_(self.params[name])
        if not self.previous_buffers:
            return
        for name, held in self.module.named_buffers():
            value = self.previous_buffers[name]
            if value.shape != held.shape or value.dtype != held.dtype:
                raise bad_input(
                    wanted=f"a buffer {name} that keeps its shape {tuple(value.shape)} and type, with {KEY}.delay 1",
                    got=f"{tuple(held.shape)} of {held.dtype}",
                    do="give it its shape in the constructor, or set train.adversarial.delay to 0",
                    key=f"{KEY}.delay",
                )
            value.copy_(held)

    @contextmanager
    def before(self) -> Iterator[BufferValues]:
        """Put the weights of the last step into the model in this context; yield copies of its buffers."""
        now = {name: self.params[name].data for name in self.previous}
        for name, value in self.previous.items():
            self.params[name].data = value  # no in-place write: graphs of other micro-batches may be alive
        try:
            yield self._buffers_before()
        finally:
            for name, value in now.items():
                self.params[name].data = value

    def _buffers_before(self) -> BufferValues:
        names = {id(held): name for name, held in self.module.named_buffers()}
        copies = {name: value.clone() for name, value in self.previous_buffers.items()}
        return [
            (owner._buffers, key, copies[names[id(held)]])
            for _, owner, key in _buffers(self.module)
            if (held := owner._buffers[key]) is not None
        ]

    def buffers(self) -> BufferValues:
        """Return what a forward of perturbed inputs finds as buffers: its own statistics, copies of all others."""
        found = []
        for name, owner, key in _buffers(self.module):
            held = owner._buffers[key]
            if held is not None:
                own = self.statistics[name] if name in self.statistics else held.detach().clone()
                found.append((owner._buffers, key, own))
        return found  # type: ignore[return-value]


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for key in owner._buffers:
            yield f"{path}.{key}" if path else key, owner, key


def copies_of_buffers(module: nn.Module) -> BufferValues:
    """Return copies of all buffers of a module."""
    return copy_buffers(module, {name for name, _ in module.named_buffers(remove_duplicate=False)})


def forms_of(module: nn.Module) -> list[TensorForm]:
    """Return the forms of what a model computes with: its parameters, also untrained ones, and its buffers."""
    return [TensorForm.of(name, x) for name, x in (*module.named_parameters(), *module.named_buffers())]


@dataclass(frozen=True, slots=True)
class Attack:
    """What perturbs the inputs of a micro-batch against the model as it is. `inputs`: the keys that are perturbed."""

    engine: ModelRuntime
    settings: AdversarialSection
    inputs: tuple[str, ...]

    def perturbed(self, piece: MicroBatch, step: int, buffers: BufferValues) -> RankBatch:
        """Return the perturbed inputs of a micro-batch. The forward may change `buffers`; the rows, and the Python
        state of the model, stay the same.
        """
        module, engine = self.engine.module, self.engine
        python = python_of(module)
        inputs = {name: piece.rows[name].detach().clone().requires_grad_() for name in self.inputs}
        with in_place_of(buffers):
            loss = engine.loss({**copies(piece.rows), **inputs}, step=step, key=piece.key)
            with engine.randomness.at(step, piece.key):  # for units that run their forward again in here
                found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        python.put_back()
        gradients = dict(zip(inputs, found, strict=True))
        return {name: self._changed(piece.rows[name], name, gradients[name]) for name in inputs}

    def _changed(self, x: Tensor, name: str, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            raise bad_input(
                wanted="inputs that the loss depends on, to perturb them",
                got=f"{name}, of which the loss has no gradient",
                do="name the inputs in train.adversarial.inputs, or set train.adversarial.epsilon to 0",
                key=f"{KEY}.inputs",
            )
        return x + perturbation(gradient, self.settings)


class PerturbedInputs(ABC):
    """Where the perturbed inputs of a step come from."""

    attack: Attack
    state: AdversarialState

    @abstractmethod
    def begin(self) -> None:
        """Prepare, once the state is restored, before the first step of this process."""

    @abstractmethod
    def prepare(self, task: Task) -> None:
        """Begin an attempt at a step, before any forward of it. Another attempt at a step finds the same inputs."""

    @abstractmethod
    def of(self, piece: MicroBatch, step: int) -> RankBatch:
        """Return the perturbed inputs of a micro-batch of the step that was prepared."""

    def watching(self, python: Snapshot) -> AbstractContextManager[None]:
        """Return the context of the forward on perturbed inputs; `python`: the Python state before it."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """End what `begin` has begun."""


@dataclass(frozen=True, slots=True)
class OfPresentWeights(PerturbedInputs):
    """A perturbation by the weights of the step itself, right before the forward that takes it."""

    attack: Attack
    state: AdversarialState

    def begin(self) -> None:
        """Do nothing."""

    def prepare(self, task: Task) -> None:
        """Do nothing."""

    def of(self, piece: MicroBatch, step: int) -> RankBatch:
        return self.attack.perturbed(piece, step, copies_of_buffers(self.attack.engine.module))

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class OfPreviousWeights(PerturbedInputs):
    """A perturbation by the weights and buffers of the last step, computed in this process at the step's beginning."""

    attack: Attack
    state: AdversarialState
    _step: int = -1
    _found: dict[int, RankBatch] = field(default_factory=dict)  # by key of a micro-batch

    def begin(self) -> None:
        """Do nothing."""

    def prepare(self, task: Task) -> None:
        step = task.window.step
        if step == self._step:
            return
        self._step, self._found = step, before_step(self.attack, self.state, task.pieces, step)
        self.state.keep()

    def of(self, piece: MicroBatch, step: int) -> RankBatch:
        return copies(self._found[piece.key])

    def close(self) -> None:
        """Do nothing."""


def before_step(
    attack: Attack, state: AdversarialState, pieces: Mapping[int, MicroBatch], step: int
) -> dict[int, RankBatch]:
    """Return the perturbed inputs of a step by the weights and buffers that `state` keeps, by key of a micro-batch."""
    found = {}
    for piece in pieces.values():
        with state.before() as buffers:
            found[piece.key] = attack.perturbed(piece, step, buffers)
    return found


@dataclass(frozen=True, slots=True)
class AdversarialPart(ModelPart):
    """An undivided model whose loss is that on a micro-batch plus that on the perturbed one."""

    engine: ModelRuntime
    inputs: PerturbedInputs

    def boundary(self, rows: RankBatch) -> StageBoundary:
        return StageBoundary()

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        assert keep_graph, "a schedule with recomputed stages is refused before"
        module = self.engine.module
        perturbed = {**copies(piece.rows), **self.inputs.of(piece, step)}
        clean = self.engine.loss(piece.rows, step=step, key=piece.key)
        with in_place_of(self.inputs.state.buffers()):
            python = python_of(module)
            with self.inputs.watching(python):
                adversarial = self.engine.loss(perturbed, step=step, key=piece.key)
            python.put_back()
        return InFlight({}, {}, clean + adversarial)


def copies(rows: RankBatch) -> RankBatch:
    """Return copies: a forward may write to its batch."""
    return {name: value.clone() for name, value in rows.items()}


def perturbation(gradient: Tensor, settings: AdversarialSection) -> Tensor:
    """Return clip(alpha * direction, -epsilon, epsilon) of a batch's input gradient.

    Rows without a valid label have no gradient (nan), and no perturbation.
    """
    known = gradient.nan_to_num(nan=0.0)
    alpha = settings.epsilon if settings.alpha == "auto" else settings.alpha
    if settings.direction == "sign":
        moved = alpha * known.sign()
    else:
        rows = known.flatten(1) if known.ndim > 1 else known.reshape(-1, 1)
        norms = rows.norm(dim=1, keepdim=True)
        moved = (alpha * torch.where(norms > 0, rows / norms, 0.0)).view(known.shape)
    return moved.clamp(-settings.epsilon, settings.epsilon)


def perturbed_inputs(settings: AdversarialSection, rows: RankBatch, caller: ForwardAdapter) -> tuple[str, ...]:
    """Return the keys of a batch to perturb: those of `settings.inputs`, else the one real-valued input of forward.

    Raises BadInput where there is none, or several and none is named.
    """
    real = [name for name, x in rows.items() if x.is_floating_point() and name != LABELS]
    taken = [name for name in real if name in caller.takes or caller.takes_all or name == caller.first]
    for name in settings.inputs:
        if name not in rows:
            raise bad_input(
                wanted=f"inputs among {', '.join(rows)}",
                got=name,
                do=f"correct the name: {nearest(name, list(rows))}",
                key=f"{KEY}.inputs",
            )
    if not taken or not set(settings.inputs) <= set(taken):
        whole = [name for name in (settings.inputs or rows) if name not in taken and name != LABELS]
        raise bad_input(
            wanted="real-valued inputs of the model's forward, as a perturbation follows their gradient",
            got=f"{', '.join(f'{name} ({_kind(rows[name])})' for name in whole) or 'none'}",
            do="set train.adversarial.epsilon to 0: whole numbers such as tokens have no gradient",
            key=f"{KEY}.inputs" if settings.inputs else KEY,
        )
    if not settings.inputs and len(taken) > 1:
        raise bad_input(
            wanted="one real-valued input, or the names of those to perturb",
            got=", ".join(taken),
            do=f"set train.adversarial.inputs to one or more of them, such as [{taken[0]}]",
            key=f"{KEY}.inputs",
        )
    return tuple(settings.inputs or taken)


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdversarialStep(StepAlgorithm):
    """A step by backpropagation whose gradients are those of an AdversarialPart."""

    inner: StepAlgorithm
    inputs: PerturbedInputs

    def attempt(self, task: Task) -> StepAttempt:
        began = time.perf_counter()
        self.inputs.prepare(task)
        seconds = time.perf_counter() - began
        done = self.inner.attempt(task)
        return replace(done, compute_s=done.compute_s + seconds)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        self.inner.commit(task, agreement, updates=updates)

    def reject(self, task: Task) -> None:
        self.inner.reject(task)

    def begin(self, done: int, until: int) -> ReplayedSteps:
        if not done:
            self.inputs.state.keep()  # of a start folder, whose weights are in the model only now
        self.inputs.begin()
        return self.inner.begin(done, until)

    def settle(self, done: int) -> None:
        self.inner.settle(done)

    def close(self) -> None:
        self.inputs.close()
        self.inner.close()
