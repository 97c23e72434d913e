"""Adversarial steps: the gradient of the loss on a batch plus that on the same batch, perturbed against the model.

Paper: Liu et al., Concurrent Adversarial Learning for Large-Batch Training, ICLR 2022, arXiv:2106.00221; separate
statistics: Xie et al., CVPR 2020, arXiv:1911.09665.
Equations, with weights w_t and batch x of step t:
    d = clip(alpha direction(grad_x L(w_{t - delay}; x)), -epsilon, epsilon)
    g = grad_w [ L(w_t; x) + L(w_t; x + d) ]
direction: the sign, or the gradient of a row over its norm. Batch normalization keeps statistics of its own for x + d.
All three passes draw the same random numbers. w_{t - 1} are the weights before the last step, also if it was rejected.
State:   with delay 1 the weights before the last step; the second statistics.
Work:    three forwards and backwards (of the first only towards the inputs), one after another, at any delay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.model.forward_adapter import ForwardAdapter
from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.recompute import BufferValues, copy_buffers, in_place_of, python_of
from gossamer.pipeline.p2p import StageBoundary
from gossamer.run.batches import MicroBatch, RankBatch
from gossamer.run.step_algorithm import ReplayedSteps, StepAlgorithm, StepAttempt
from gossamer.run.step_runner import ModelPart, ModelRuntime
from gossamer.run.task import Task
from gossamer.spec.config import AdversarialSection
from gossamer.spec.errors import bad_input
from gossamer.spec.suggest import nearest
from gossamer.sync import StepAgreement

_LABELS = "labels"
_KEY = "train.adversarial"


@dataclass(frozen=True, slots=True)
class AdversarialState:
    """The state of adversarial training on one rank, changed in place.

    `params`: the trained parameters by name; `previous`: their values before the last step, empty without a delay;
    `statistics`: the buffers of batch normalization for perturbed inputs, by name.
    """

    params: Mapping[str, Tensor]
    previous: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]

    @staticmethod
    def of(module: nn.Module, params: Mapping[str, Tensor], settings: AdversarialSection) -> AdversarialState:
        """Return the state before the first step: the present weights and statistics."""
        previous = {name: p.detach().clone() for name, p in params.items()} if settings.delay else {}
        found = {name: owner._buffers[key] for name, owner, key in _buffers(module) if isinstance(owner, _BatchNorm)}
        return AdversarialState(params, previous, {n: b.detach().clone() for n, b in found.items() if b is not None})

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the present weights as those before the step that ends now."""
        for name, value in self.previous.items():
            value.copy_(self.params[name])

    @contextmanager
    def before(self) -> Iterator[None]:
        """Put the weights before the last step into the model in this context, if they are kept."""
        now = {name: self.params[name].data for name in self.previous}
        for name, value in self.previous.items():
            self.params[name].data = value  # no in-place write: graphs of other micro-batches may be alive
        try:
            yield
        finally:
            for name, value in now.items():
                self.params[name].data = value

    def buffers(self, module: nn.Module) -> BufferValues:
        """Return what a forward of perturbed inputs finds as buffers: its own statistics, copies of all others."""
        found = []
        for name, owner, key in _buffers(module):
            held = owner._buffers[key]
            if held is not None:
                own = self.statistics[name] if name in self.statistics else held.detach().clone()
                found.append((owner._buffers, key, own))
        return found  # type: ignore[return-value]


def _buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for key in owner._buffers:
            yield f"{path}.{key}" if path else key, owner, key


@dataclass(frozen=True, slots=True)
class AdversarialPart(ModelPart):
    """An undivided model whose loss is that on a micro-batch plus that on the perturbed one.

    `inputs`: the keys of a batch that are perturbed.
    """

    engine: ModelRuntime
    settings: AdversarialSection
    inputs: tuple[str, ...]
    state: AdversarialState

    def boundary(self, rows: RankBatch) -> StageBoundary:
        return StageBoundary()

    def forward(
        self, piece: MicroBatch, step: int, received: Mapping[CallOutput, Tensor], *, keep_graph: bool = True
    ) -> InFlight:
        assert keep_graph, "a schedule with recomputed stages is refused before"
        module = self.engine.module
        perturbed = self.perturbed(piece, step)
        clean = self.engine.loss(piece.rows, step=step, key=piece.key)
        python = python_of(module)
        with in_place_of(self.state.buffers(module)):
            adversarial = self.engine.loss(perturbed, step=step, key=piece.key)
        python.put_back()
        return InFlight({}, {}, clean + adversarial)

    def perturbed(self, piece: MicroBatch, step: int) -> RankBatch:
        """Return the rows with perturbed inputs. The rows, and buffers and Python state of the model, stay the same."""
        module, engine = self.engine.module, self.engine
        python = python_of(module)
        names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        inputs = {name: piece.rows[name].detach().clone().requires_grad_() for name in self.inputs}
        with self.state.before(), in_place_of(copy_buffers(module, names)):
            loss = engine.loss({**_copies(piece.rows), **inputs}, step=step, key=piece.key)
            with engine.randomness.at(step, piece.key):  # for units that run their forward again in here
                found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        python.put_back()
        gradients = dict(zip(inputs, found, strict=True))
        changed = {name: self._changed(piece.rows[name], name, gradients[name]) for name in inputs}
        return {**_copies(piece.rows), **changed}

    def _changed(self, x: Tensor, name: str, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            raise bad_input(
                wanted="inputs that the loss depends on, to perturb them",
                got=f"{name}, of which the loss has no gradient",
                do="name the inputs in train.adversarial.inputs, or set train.adversarial.epsilon to 0",
                key=f"{_KEY}.inputs",
            )
        return x + perturbation(gradient, self.settings)


def _copies(rows: RankBatch) -> RankBatch:
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
    real = [name for name, x in rows.items() if x.is_floating_point() and name != _LABELS]
    taken = [name for name in real if name in caller.takes or caller.takes_all or name == caller.first]
    for name in settings.inputs:
        if name not in rows:
            raise bad_input(
                wanted=f"inputs among {', '.join(rows)}",
                got=name,
                do=f"correct the name: {nearest(name, list(rows))}",
                key=f"{_KEY}.inputs",
            )
    if not taken or not set(settings.inputs) <= set(taken):
        whole = [name for name in (settings.inputs or rows) if name not in taken and name != _LABELS]
        raise bad_input(
            wanted="real-valued inputs of the model's forward, as a perturbation follows their gradient",
            got=f"{', '.join(f'{name} ({_kind(rows[name])})' for name in whole) or 'none'}",
            do="set train.adversarial.epsilon to 0: whole numbers such as tokens have no gradient",
            key=f"{_KEY}.inputs" if settings.inputs else _KEY,
        )
    if not settings.inputs and len(taken) > 1:
        raise bad_input(
            wanted="one real-valued input, or the names of those to perturb",
            got=", ".join(taken),
            do=f"set train.adversarial.inputs to one or more of them, such as [{taken[0]}]",
            key=f"{_KEY}.inputs",
        )
    return tuple(settings.inputs or taken)


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdversarialStep(StepAlgorithm):
    """A step by backpropagation whose gradients are those of an AdversarialPart; it keeps the weights before it."""

    inner: StepAlgorithm
    state: AdversarialState

    def attempt(self, task: Task) -> StepAttempt:
        return self.inner.attempt(task)

    def commit(self, task: Task, agreement: StepAgreement, *, updates: int) -> None:
        self.state.keep()
        self.inner.commit(task, agreement, updates=updates)

    def reject(self, task: Task) -> None:
        self.state.keep()
        self.inner.reject(task)

    def begin(self, done: int, until: int) -> ReplayedSteps:
        return self.inner.begin(done, until)

    def settle(self, done: int) -> None:
        self.inner.settle(done)

    def close(self) -> None:
        self.inner.close()
