"""The experts of a teacher on another host: they are asked what they give for the inputs of the student's experts.

What a student's router sends to its experts is known after its forward alone. So there is one question for each
micro-batch, when its loss is due, with the inputs of all layers, and the student waits for the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from gossamer.prune import (
    ExpertCall,
    ModuleExperts,
    TeacherExperts,
    mean_square,
    other_experts,
    parameter_shapes,
)
from gossamer.run.remote_teacher.frames import packed
from gossamer.run.remote_teacher.link import TeacherLink
from gossamer.run.remote_teacher.messages import MOST_ASKED_BYTES, Ask, ExpertLayer, Ready, Terms
from gossamer.run.remote_teacher.stage import Reading
from gossamer.spec.errors import WireMismatch, bad_input
from gossamer.spec.units import show_bytes

_KEY = "train.loss"


def layer_of(path: str, experts: nn.Module) -> ExpertLayer:
    """Return what is compared of the experts at `path`."""
    shapes = sorted(parameter_shapes(experts).items())
    return ExpertLayer(path=path, shapes=hashlib.sha256(repr(shapes).encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class ServedExperts:
    """The experts of a whole teacher, which answer students."""

    module: nn.Module
    device: torch.device

    def ready(self, terms: Terms) -> Ready:
        """Return the consent to terms. Raises BadInput for experts of other shapes, or of another type."""
        known = dict(self.module.named_modules())
        for layer in terms.experts:
            found = known.get(layer.path)
            if found is None or layer_of(layer.path, found) != layer:
                raise other_experts(layer.path, is_there=found is not None)
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        if dtype != terms.dtype:
            raise bad_input(
                wanted=f"a student in {dtype}, the type of its teacher on another host",
                got=terms.dtype,
                do="set model.dtype to that type, or give the teacher's folder, which is converted",
                key=_KEY,
            )
        return Ready(width=0, hidden=0, compute=dtype, names=())

    @torch.no_grad()
    def outputs(self, reading: Reading, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what the experts give for the inputs of a question. Raises WireMismatch for one of another form."""
        experts, found = ModuleExperts(self.module), dict[str, Tensor]()
        for number, layer in enumerate(reading.terms.experts):
            inputs, calls = batch.get(f"inputs.{number}"), batch.get(f"calls.{number}")
            if inputs is None and calls is None:
                continue  # no token went to this layer
            if inputs is None or calls is None:
                raise WireMismatch(f"wanted inputs.{number} with calls.{number}, got one of them")
            _check(inputs, calls, _count(self.module, layer.path))
            rows, made = torch.split(inputs, calls[:, 1].tolist()), list[Tensor]()
            with reading.precision.autocast(self.device):
                for expert, x in zip(calls[:, 0].tolist(), rows, strict=True):
                    given = x.clone().to(self.device)  # in memory of its own, as in the student
                    made.append(experts.output(layer.path, expert, (given,), {}))
            found[f"outputs.{number}"] = torch.cat(made)
        return found


def _count(module: nn.Module, path: str) -> int:
    """Return how many experts are at `path`: children of a list, or matrices in one parameter."""
    at = module.get_submodule(path)
    return len([*at.children()]) if isinstance(at, nn.ModuleList | nn.ModuleDict) else len(next(at.parameters()))


def _check(inputs: Tensor, calls: Tensor, experts: int) -> None:
    fits = inputs.ndim == 2 and inputs.is_floating_point() and calls.dtype is torch.int64
    fits = fits and calls.ndim == 2 and calls.shape[1] == 2 and len(calls) > 0
    fits = fits and int(calls.min()) >= 0 and int(calls[:, 0].max()) < experts
    if not fits or int(calls[:, 1].max()) > len(inputs) or int(calls[:, 1].sum()) != len(inputs):  # a sum may wrap
        raise WireMismatch(
            f"wanted rows for calls of {experts} experts, got {tuple(inputs.shape)}, {calls.tolist()[:8]}"
        )


@dataclass(slots=True, eq=False)
class RemoteExperts(TeacherExperts):
    """The experts of the teacher at the other end of `link`, as the distance of a student's experts sees them.

    `layers`: the student's; `sent_bytes`, `came_bytes`: of the newest question and its answer.
    """

    link: TeacherLink
    device: torch.device
    layers: list[ExpertLayer] = field(default_factory=list)
    sent_bytes: int = 0
    came_bytes: int = 0
    _calls: list[ExpertCall] = field(default_factory=list)
    _answers: list[Tensor] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=lambda: count(-1, -1))

    def check(self, path: str, own: nn.Module) -> None:
        self.layers.append(layer_of(path, own))

    def begin(self) -> None:
        self._calls.clear()
        self._answers.clear()

    def distance(self, call: ExpertCall) -> Callable[[], Tensor]:
        if len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], Tensor) or call.args[0].ndim != 2:
            raise bad_input(
                wanted=f"experts in {call.path} that are called with rows alone, for a teacher on another host",
                got="other arguments",
                do="give the teacher's folder",
                key=_KEY,
            )
        if not call.is_new:
            return lambda: call.output.new_zeros(())
        at, output = len(self._calls), call.output.clone()  # some models weigh it in place
        self._calls.append(call)
        return lambda: mean_square(output, self._answer(at))

    def _answer(self, at: int) -> Tensor:
        """Return what the teacher gives for a call; the first time the teacher is asked for all."""
        if not self._answers:
            self._answers = self._asked()
        return self._answers[at]

    def _asked(self) -> list[Tensor]:
        paths = [one.path for one in self.layers]
        tensors, shapes, order = dict[str, Tensor](), dict[str, tuple[tuple[int, ...], torch.dtype]](), list[int]()
        for number, path in enumerate(paths):
            mine = [at for at, call in enumerate(self._calls) if call.path == path]
            if not mine:
                continue
            calls = [self._calls[at] for at in mine]
            rows = torch.cat([call.args[0].detach() for call in calls])
            tensors[f"inputs.{number}"] = rows
            tensors[f"calls.{number}"] = torch.tensor([[call.number, len(call.args[0])] for call in calls])
            shapes[f"outputs.{number}"] = (len(rows), *calls[0].output.shape[1:]), calls[0].output.dtype
            order += mine
        self.sent_bytes = sum(one.nbytes for one in tensors.values())
        if self.sent_bytes > MOST_ASKED_BYTES:
            raise bad_input(
                wanted=f"at most {show_bytes(MOST_ASKED_BYTES)} of what the experts see in a micro-batch",
                got=show_bytes(self.sent_bytes),
                do="raise train.accumulate, or give the teacher's folder",
                key=_KEY,
            )
        self.came_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
        number = next(self._numbers)
        self.link.ask(number, packed(Ask(number=number), tensors), rows=0, most_bytes=self.came_bytes)
        _, answer = self.link.take(number)
        if {name: (tuple(one.shape), one.dtype) for name, one in answer.items()} != shapes:
            raise WireMismatch(f"the teacher at {self.link.where} sent other tensors than outputs of experts: {shapes}")
        found = dict[int, Tensor]()
        at = iter(order)
        for name in shapes:
            layer = paths[int(name.rpartition(".")[2])]
            sizes = [len(call.args[0]) for call in self._calls if call.path == layer]
            for rows in torch.split(answer[name], sizes):
                found[next(at)] = rows.to(self.device)
        return [found[one] for one in range(len(self._calls))]
