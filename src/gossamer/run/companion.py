"""The companion process of a rank: it computes the perturbation of batch t + 1 while the rank computes step t.

Paper and equations: `adversarial_step`. Both take the weights and buffers at the beginning of step t: these are copied
into shared memory then, as they are kept there anyway (`AdversarialState.previous`). So the rank may update its own at
any time, by any optimizer, and nobody waits for the other within a step:

    rank        wait for t's perturbation | copy w_t, batch t + 1 | forwards, backward, exchange, update of step t
    companion                                                     | perturbation of batch t + 1 by w_t

Numbers: those of one process, bit for bit: the same code, on the same values, with as many threads and the same keys of
random numbers. That is checked: the rank computes the first two perturbations itself, too, and refuses a model that
keeps state elsewhere than in parameters and buffers, as the companion's copy of it would not follow.
Memory: in the companion an interpreter, one forward with its activations, the buffers; in the rank a copy of the frozen
parameters. Weights and batches are there once, shared. Copies: weights, buffers and one batch per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gossamer.model.snapshot import Snapshot
from gossamer.process.companion_link import CompanionLink
from gossamer.run.adversarial_step import KEY, AdversarialState, Attack, PerturbedInputs, before_step, copies, forms_of
from gossamer.run.batches import Feed, MicroBatch, RankBatch, cut
from gossamer.run.companion_messages import (
    TO_RANK,
    Batch,
    Done,
    Ready,
    Setup,
    SharedForm,
    perturbed_name,
    row_name,
)
from gossamer.run.shared_tensors import SharedTensors, TensorForm
from gossamer.run.task import Task
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input

_AHEAD = f"{KEY}.ahead"
_OFF = f"set {_AHEAD} to false, which computes the perturbation in the rank itself"
_CHECKED = 2  # perturbations: of the first step, which is computed on request, and of the second, computed ahead


@dataclass(slots=True, kw_only=True)
class Companion(PerturbedInputs):
    """The perturbed inputs that the companion process of this rank computes.

    `steps`: of the run, after the last of which there is nothing to compute; `timeout_s`: without a message, after
    which the companion has failed; `at`: reports the position of this rank.
    """

    attack: Attack
    state: AdversarialState
    memory: SharedTensors  # of the weights and buffers
    feed: Feed
    config: RunConfig
    units: Sequence[str]
    rows: RankBatch  # one row, for its form
    at: Callable[[int, str], None]
    _link: CompanionLink[Ready | Done] | None = None
    _rows: SharedTensors | None = None  # of the batches
    _step: int = -1  # whose inputs are there
    _asked: int = -1  # whose inputs the companion computes
    _found: dict[int, RankBatch] = field(default_factory=dict)
    _checked: int = 0

    def begin(self) -> None:
        for name, param in self.attack.engine.module.named_parameters():  # also those that no step changes
            if name not in self.state.previous:
                self.memory.tensors[name].copy_(param.detach())
        plan = self.feed.plan
        sizes = cut(plan.rows[self.feed.replica], plan.microbatches[self.feed.replica])
        self._rows = SharedTensors.new([*self._forms(sizes)])
        self._link = CompanionLink.to_new(
            "gossamer.run.companion_process",
            TO_RANK,
            descriptors=(self._rows.descriptor, self.memory.descriptor),
            timeout_s=self.config.machines.timeout_s,
            name="the companion process of this rank",
            longer="a forward and backward of a micro-batch",
            other=_OFF,
        )
        setup = Setup(
            config=self.config.model_dump_json(),
            units=list(self.units),
            names=list(self.rows),
            inputs=list(self.attack.inputs),
            threads=torch.get_num_threads(),
            weights_descriptor=self.memory.descriptor,
            rows_descriptor=self._rows.descriptor,
            weights=SharedForm.all_of(forms_of(self.attack.engine.module)),
            rows=SharedForm.all_of([*self._forms(sizes)]),
        )
        self._link.send(setup, _work(0))

    def _forms(self, sizes: Sequence[int]) -> Iterator[TensorForm]:
        for number, size in enumerate(sizes):
            for name, x in self.rows.items():
                form = TensorForm.of(name, x)
                shape = (size, *form.shape[1:])
                yield TensorForm(row_name(number, name), form.dtype, shape)
                if name in self.attack.inputs:
                    yield TensorForm(perturbed_name(number, name), form.dtype, shape)

    def prepare(self, task: Task) -> None:
        step = task.window.step
        if step == self._step:
            return
        if self._asked != step:
            self._ask(step, task.pieces)  # the first step of this process
        self._take(step, task.pieces)
        if self._checked < _CHECKED:
            self._check(step, task.pieces)
            self._checked += 1
        self.state.keep()
        if step + 1 < self.config.train.steps:
            self._ask(step + 1, self.feed.look_ahead(step + 1))

    def _ask(self, step: int, pieces: Mapping[int, MicroBatch]) -> None:
        """Hand a batch to the companion."""
        for number, piece in pieces.items():
            for name, x in piece.rows.items():
                place = self.batches.tensors.get(row_name(number, name))
                if place is None or place.shape != x.shape or place.dtype != x.dtype:
                    raise bad_input(
                        wanted=f"batches of one form with {_AHEAD}, whose memory is laid out before the first step",
                        got=f"{name} of {tuple(x.shape)}, {x.dtype} in step {step}",
                        do=f"make all items of the dataset alike, or {_OFF}",
                        key=_AHEAD,
                    )
                place.copy_(x)
        keys = [pieces[number].key for number in range(len(pieces))]
        self.link.send(Batch(step=step, keys=keys), _work(step))
        self._asked = step

    def _take(self, step: int, pieces: Mapping[int, MicroBatch]) -> None:
        """Wait for the companion, and copy what it has computed."""
        for number in range(len(pieces)):
            said = self._next(step)
            while isinstance(said, Ready):
                said = self._next(step)
            assert (said.step, said.number) == (step, number)
        held = self.batches.tensors
        self._step = step
        self._found = {
            piece.key: {name: held[perturbed_name(number, name)].clone() for name in self.attack.inputs}
            for number, piece in pieces.items()
        }

    def _next(self, step: int) -> Ready | Done:
        def is_due() -> bool:
            self.at(step, "perturb")  # this rank is not the one that hangs
            return True

        return self.link.wait(_work(step), is_due)

    def _check(self, step: int, pieces: Mapping[int, MicroBatch]) -> None:
        """Raise BadInput where this process computes other perturbed inputs than the companion."""
        for key, own in before_step(self.attack, self.state, pieces, step).items():
            for name, value in own.items():
                other = self._found[key][name]
                if not torch.equal(value.nan_to_num(), other.nan_to_num()):
                    away = (value - other).abs().nan_to_num()
                    raise bad_input(
                        wanted=f"the same perturbation of {name} from the companion process as from the rank",
                        got=f"{int((away > 0).sum())} of {away.numel()} elements that differ, by up to "
                        f"{float(away.max()):.3g}, in step {step}",
                        do=f"keep what the model computes with in its parameters and buffers, or {_OFF}",
                        key=_AHEAD,
                    )

    def of(self, piece: MicroBatch, step: int) -> RankBatch:
        return copies(self._found[piece.key])

    @contextmanager
    def watching(self, python: Snapshot) -> Iterator[None]:
        """Raise BadInput for a forward that changes what the companion does not have: Python state, other tensors."""
        held = [(x, x._version) for x in (*python.tensors, *self.attack.engine.module.parameters())]
        yield
        changed = next((one.name for one in python.differences() if "_buffers." not in one.name), "")
        written = next((python.name_of(x) for x, version in held if x._version != version), "")
        if changed or written:
            raise bad_input(
                wanted=f"a forward that changes nothing but buffers with {_AHEAD}, as the companion process has a "
                "model of its own",
                got=f"a change of {changed or written}",
                do=f"keep the value in a registered buffer, or {_OFF}",
                key=_AHEAD,
            )

    @property
    def link(self) -> CompanionLink[Ready | Done]:
        """Return the connection, which `begin` opened."""
        assert self._link is not None
        return self._link

    @property
    def batches(self) -> SharedTensors:
        """Return the memory of the batches, which `begin` made."""
        assert self._rows is not None
        return self._rows

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._rows is not None:
            self._rows.close()
            self._rows = None
        self.memory.close()


def _work(step: int) -> str:
    return f"the perturbation of step {step}"
