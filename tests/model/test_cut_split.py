"""A backward in two parts, and a forward run again, against the backward and the forward in one."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.model.cut.cuts import Cuts, even_cuts
from gossamer.model.cut.flow import Value
from gossamer.model.cut.lockstep import Loss, Outcome, gradients_of, run_lockstep, stages_of
from gossamer.model.cut.split import backward_input
from gossamer.model.cut.stage import Live, Stage
from gossamer.model.cut.trace import trace
from gossamer.model.randomness import unit_seeds
from gossamer.model.units import unit_names
from model.cuttable import MODULES, WIDTH, Chain, Layer, ResidualCnn, image, rows

Batch = Mapping[str, Any]
TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": TEXT | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "attention_dropout": 0.2},
    "gpt2": TEXT | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
}  # fmt: skip


def mean_square(module: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = module(batch["x"])
    return (output - 0.3).square().mean()


def in_bf16(module: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = module(batch["x"])
    return (output.float() - 0.3).square().mean()


def staged(module: nn.Module, loss: Loss, batch: Batch, cuts: int | Cuts) -> list[Stage]:
    flow = trace(module, lambda: loss(module, batch), units=unit_names(module))
    return stages_of(module, flow, even_cuts(flow, cuts) if isinstance(cuts, int) else cuts)


def forward(stages: Sequence[Stage], loss: Loss, batch: Batch, *, keep_graph: bool = True) -> list[Live]:
    lives: list[Live] = []
    tensors: dict[Value, Tensor] = {}
    for stage in stages:
        lives.append(stage.forward(partial(loss, stage.module, batch), tensors, keep_graph=keep_graph))
        tensors = lives[-1].sent
    return lives


def run_in_parts(stages: Sequence[Stage], loss: Loss, batches: Sequence[Batch], *, keep_graph: bool = True) -> Outcome:
    """The weights of a micro-batch after the forward and the inputs of the next one."""
    losses, waiting = [], list[Live]()
    for batch in batches:
        lives = forward(stages, loss, batch, keep_graph=keep_graph)
        losses.append(lives[-1].result.detach())
        gradients: dict[Value, Tensor] = {}
        for live in reversed(lives):
            if not keep_graph:
                live.recompute()
            gradients = live.backward_input(gradients, loss=live.result)
        for live in waiting:
            live.backward_weight()
        waiting = lives
    for live in waiting:
        live.backward_weight()
    return Outcome(losses, gradients_of(stages))


def run_again(stages: Sequence[Stage], loss: Loss, batches: Sequence[Batch]) -> Outcome:
    """All forwards, and then all backwards, each of a graph that is made only then."""
    lives = [forward(stages, loss, batch, keep_graph=False) for batch in batches]
    for one in lives:
        gradients: dict[Value, Tensor] = {}
        for live in reversed(one):
            live.recompute()
            gradients = live.backward(gradients, loss=live.result)
    return Outcome([one[-1].result.detach() for one in lives], gradients_of(stages))


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert ours.gradients.keys() == theirs.gradients.keys()
    different = [n for n, g in theirs.gradients.items() if not torch.equal(ours.gradients[n], g)]
    assert not different


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", MODULES)
def test_input_and_weight_parts_are_the_whole(kind: str, stages: int) -> None:
    make, inputs = MODULES[kind]
    torch.manual_seed(0)
    module: nn.Module = make()
    batches = [{"x": inputs(seed)} for seed in range(3)]
    runs = [run_lockstep, run_in_parts, run_again, partial(run_in_parts, keep_graph=False)]
    whole, *others = [run(staged(module, mean_square, batches[0], stages), mean_square, batches) for run in runs]
    for other in others:
        assert_same(other, whole)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str, stages: int) -> None:
    """With dropout: every forward, again or not, is under the key of its micro-batch."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    module = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = [torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    batches = [{"input_ids": one, "labels": one} for one in ids]
    outcomes = []
    for run in (run_lockstep, run_in_parts, run_again, partial(run_in_parts, keep_graph=False)):
        parts = staged(module, lambda m, b: m(**b).loss, batches[0], stages)
        seeds = {id(part.module): unit_seeds(part.module, seed=1) for part in parts}

        def loss(m: nn.Module, b: Batch, by: Any = seeds) -> Tensor:
            with by[id(m)].at(0, int(b["labels"].sum())):
                found: Tensor = m(**b).loss
            return found

        outcomes.append(run(parts, loss, batches))
    for other in outcomes[1:]:
        assert_same(other, outcomes[0])
