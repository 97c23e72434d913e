"""The companion process of a rank: `python -m gossamer.run.companion_process DESCRIPTOR`, started by `Companion`.

It builds the model of the run's configuration, puts the shared weights and buffers under it, and computes the perturbed
inputs of every batch that the rank puts into shared memory. It ends when the rank closes the connection, or is gone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.origin import origin_of
from gossamer.model.precision import precision_of
from gossamer.model.unit_seeds import unit_seeds
from gossamer.process.companion_link import serve_rank
from gossamer.process.json_channel import JsonChannel
from gossamer.recipe import PlanMethods, Recipe
from gossamer.run.adversarial_step import Attack, copies_of_buffers, forms_of
from gossamer.run.batches import MicroBatch
from gossamer.run.companion_messages import TO_COMPANION, Batch, Done, Ready, Setup, perturbed_name, row_name
from gossamer.run.process_settings import set_memory
from gossamer.run.shared_tensors import SharedTensors
from gossamer.run.step_runner import ModelRuntime
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import bad_input


def main() -> int:
    """Serve the rank at the other end of the connection in the first argument; return the exit code."""
    return serve_rank(TO_COMPANION, serve)


def serve(channel: JsonChannel[Setup | Batch]) -> None:
    """Build the model that the rank names, and perturb batches until the rank is gone."""
    setup = channel.receive()
    if not isinstance(setup, Setup):
        return
    companion = Perturbing.of(setup)
    channel.send(Ready())
    while isinstance(batch := channel.receive(), Batch):
        for number, key in enumerate(batch.keys):
            companion.perturb(batch.step, number, key)
            channel.send(Done(step=batch.step, number=number))


@dataclass(frozen=True, slots=True)
class Perturbing:
    """The model of this process with the memory that it shares with the rank."""

    attack: Attack
    rows: SharedTensors
    names: tuple[str, ...]  # of what a batch has

    @staticmethod
    def of(setup: Setup) -> Perturbing:
        """Build the model. Raises BadInput where it is not the rank's, and what the user's code raises."""
        config = RunConfig.model_validate_json(setup.config)
        set_memory(PlanMethods.asked(config.plan).sharding)
        torch.set_num_threads(setup.threads)
        module = origin_of(config.model).build(config.train.seed)
        weights = SharedTensors.at(setup.weights_descriptor, [one.form for one in setup.weights])
        _share(module, weights, setup)
        rows = SharedTensors.at(setup.rows_descriptor, [one.form for one in setup.rows])
        module.train()
        engine = ModelRuntime(
            module=module,
            caller=caller_of(module, {name: rows.tensors[row_name(0, name)] for name in setup.names}),
            objective=Recipe.loss_of(config),
            precision=precision_of(config.train.precision),
            randomness=unit_seeds(module, setup.units, seed=config.train.seed),
            device=torch.device("cpu"),
        )
        return Perturbing(Attack(engine, config.train.adversarial, tuple(setup.inputs)), rows, tuple(setup.names))

    def perturb(self, step: int, number: int, key: int) -> None:
        """Write the perturbed inputs of a micro-batch to the shared memory."""
        held = self.rows.tensors
        piece = MicroBatch(key, {name: held[row_name(number, name)] for name in self.names})
        found = self.attack.perturbed(piece, step, copies_of_buffers(self.attack.engine.module))
        for name, value in found.items():
            held[perturbed_name(number, name)].copy_(value)


def _share(module: nn.Module, weights: SharedTensors, setup: Setup) -> None:
    """Put the shared tensors under the parameters and buffers of the module."""
    mine, theirs = forms_of(module), [one.form for one in setup.weights]
    if mine != theirs:
        here, there = sorted({*mine} ^ {*theirs}, key=repr)[:2], f"{len(theirs)} parameters and buffers"
        raise bad_input(
            wanted=f"a model of the {there} that the rank has, in its companion process",
            got=f"another one: {', '.join(f'{one.name} {one.shape} {one.dtype}' for one in here)}",
            do="build the same model in every process, or set train.adversarial.ahead to false",
            key="train.adversarial.ahead",
        )
    for name, param in module.named_parameters():
        param.data = weights.tensors[name]
    first = {id(held): name for name, held in module.named_buffers()}
    for owner in module.modules():
        for key, held in owner._buffers.items():
            if held is not None:
                owner._buffers[key] = weights.tensors[first[id(held)]]


if __name__ == "__main__":
    sys.exit(main())
