"""Whatever a model keeps from forward to forward: only steps move it, and one process is the plain loop."""

from __future__ import annotations

import io
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossamer import loss
from gossamer.autotune.trial_steps import TrialSteps
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.job.rank_inputs import DataDescription, RankContext, RankJob
from gossamer.job.rank_job import run_job
from gossamer.model.forward_adapter import caller_of
from gossamer.model.model_profile import forward_flop_per_token
from gossamer.model.precision import FP16
from gossamer.model.side_effects import gradless, untouched
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches, Feed
from gossamer.run.checkpoint import trainable
from gossamer.run.engine import engine_of
from gossamer.run.parts import Parts
from gossamer.run.profile_step import profile_step
from gossamer.run.reexecution import Reexecution
from gossamer.run.validation_set import ValidationSet
from gossamer.spec.config import RunConfig
from gossamer.view.run_directory import RunDirectory
from model import habits
from model.habits import HABITS, Net, begin
from run.jobs import Letters

STEPS = 3


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(0, 16, (24, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def parts_of(module: nn.Module, **train: Any) -> Parts:
    data, objective = DatasetBatches(Rows()), loss.build("next_token")
    optimizer = {"optimizer": {"sgd": {"lr": 0.1}}, "lr_schedule": "constant", "max_grad_norm": 0, "accumulate": 2}
    config = RunConfig.model_validate({"train": {"steps": STEPS, "batch": 4, **optimizer, **train}})
    cpu = torch.device("cpu")
    asked = PartitionRequest(config=config, ranks=1, rank=0, batches=data, objective=objective, device=cpu)
    held = build_rank_model(ModuleSource(module), asked, None)
    return Parts(
        module=held.module,
        objective=objective,
        train=data,
        validation={"validation": ValidationSet(DatasetBatches(Rows()))},
        config=config,
        plan=held.plan,
        device=cpu,
        words=Letters(),
    )


def run_alone(parts: Parts, folder: Path, *, resume: bool = False) -> RunDirectory:
    """The real job, in this process."""
    directory = RunDirectory(folder / "run")
    run_job(
        RankJob(
            parts=parts,
            where=RankContext(store=dist.HashStore(), interface="lo"),
            directory=directory,
            described="Net",
            data=DataDescription(fingerprint="rows", text="rows"),
            resume=resume,
            at=lambda step, phase: None,
            asked_to_stop=lambda: False,
            is_kept=True,
        )
    )
    return directory


def state_of(module: Net) -> bytes:
    """All of it, in bytes."""
    kept: list[Any] = [habits.CALLS, habits.STATE, habits.OfTheClass.made, habits.RANDOM.bit_generator.state]
    kept += [habits.DICE.getstate(), np.random.get_state(), torch.get_rng_state()]
    if isinstance(module, habits.Closure):
        kept.append(module.count.__closure__[0].cell_contents)
    for name, inner in module.named_modules():
        own = {n: x for n, x in vars(inner).items() if n not in ("_modules", "count")}
        for n in ("_forward_hooks", "forward"):
            own[n] = len(own[n]) if isinstance(own.get(n), dict) else repr(type(own.get(n)))
        own = {n: (x.initial_seed(), x.get_state()) if isinstance(x, torch.Generator) else x for n, x in own.items()}
        kept.append((name, {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in own.items()}))
    grads = [(p.requires_grad, p.grad) for p in module.parameters()]
    found = io.BytesIO()
    _Numbers(found).dump((kept, grads))
    return found.getvalue()


class _Numbers(pickle.Pickler):
    """Of a tensor its numbers alone, and not where they lie."""

    def persistent_id(self, held: Any) -> Any:
        if not isinstance(held, torch.Tensor):
            return None
        own = {n: x for n, x in vars(held).items() if not n.startswith("_")}
        return held.dtype, held.requires_grad, own, held.detach().contiguous().numpy().tobytes()


def test_a_profile_has_sparse_gradients_as_buckets_hold_them() -> None:
    """Those of a table with `sparse=True`; whoever chooses an exchange by them counts and encodes all rows."""
    module, rows = begin(HABITS[0]), begin(HABITS[0])
    rows.embed.sparse = True
    found = []
    for one in (module, rows):
        parts = parts_of(one)
        feed = Feed(parts.train, parts.plan, 0, 0)
        found.append(profile_step(engine_of(parts), feed, trainable(one)).gradients)
    dense, whole = found
    assert dense.keys() == whole.keys() and dense["embed.weight"].any()
    for name, gradient in whole.items():
        assert gradient.layout == torch.strided and torch.equal(gradient, dense[name])


@pytest.mark.parametrize("loss_of", [1e-7, 1e3])
def test_gradients_of_a_profile_in_fp16_are_those_of_a_scaled_loss(loss_of: float) -> None:
    """Small ones are not zero, and where the first scale is too large a smaller one is taken."""
    module = begin(Net)
    parts = parts_of(module)
    engine, feed = engine_of(parts), Feed(parts.train, parts.plan, 0, 0)
    found = []
    for factor in (1.0, loss_of):

        def objective(output: Any, rows: Any, factor: float = factor) -> torch.Tensor:
            return engine.objective(output, rows) * factor

        half = replace(engine, precision=FP16, objective=objective)  # type: ignore[arg-type]
        found.append(profile_step(half, feed, trainable(module)).gradients)
    usual, other = found
    for name, gradient in usual.items():
        assert gradient.any()
        torch.testing.assert_close(
            other[name] / loss_of, gradient, rtol=0.1, atol=2e-2 * float(gradient.abs().max()), msg=name
        )


def test_a_profile_draws_nothing_from_generators_that_the_data_draws_from() -> None:
    """Else training would have other data than with the exchange named by hand."""
    module = begin(HABITS[0])
    parts = parts_of(module)
    feed, drawn = Feed(parts.train, parts.plan, 0, 0), list[float]()

    def fetch(step: int) -> Any:
        drawn.append(float(torch.rand(())) + random.random() + float(np.random.rand()))
        return feed.fetch(step)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    profile_step(engine_of(parts), SimpleNamespace(fetch=fetch), trainable(module))  # type: ignore[arg-type]
    assert drawn and torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@pytest.mark.parametrize("kind", HABITS)
def test_nothing_stays_of_a_look(kind: type[Net]) -> None:
    module = begin(kind)
    parts = parts_of(module)
    module.mix.bias.grad = torch.full((8,), 2.0)
    before = state_of(module)
    flop = forward_flop_per_token(module, caller_of(module), {"input_ids": Rows.ids[:1]})
    assert flop >= 2 * (8 * 8 + 8 * 16) and state_of(module) == before
    engine = engine_of(parts)
    before = state_of(module)
    feed = Feed(parts.train, parts.plan, 0, 0)
    gradients = profile_step(engine, feed, trainable(module)).gradients
    assert float(gradients["head.weight"].norm()) > 0 and state_of(module) == before
    pump = CommThread(LocalChannel.world(1)[0])
    trials = TrialSteps(parts=parts, engine=engine, feed=feed, pump=pump, at=lambda step, phase: None)
    assert trials.alone_s(0) > 0 and state_of(module) == before
    times = trials.times(parts.plan.model_copy(update={"exchange": {"error_feedback": {"inner": "dense"}}}), 0)
    pump.close()
    assert times.compute_s > 0 and state_of(module) == before
    Reexecution(engine, feed, trainable(module)).redo(1, 0, 7)
    assert state_of(module) == before
    with untouched(module):
        module.eval()
        gradless(lambda: module(Rows.ids[:2]))
        with torch.enable_grad():
            module(Rows.ids[:2]).sum().backward()
        assert state_of(module) != before
    assert state_of(module) == before


@pytest.mark.parametrize("kind", HABITS)
def test_one_process_is_the_plain_loop(kind: type[Net], tmp_path: Path) -> None:
    """With evaluations and samples between its steps."""
    module = begin(kind)
    parts = parts_of(module)
    feed, plain = Feed(parts.train, parts.plan, 0, parts.config.train.seed), []
    module.train()
    for step in range(STEPS):
        pieces, mean = feed.fetch(step), 0.0
        module.zero_grad()
        for piece in pieces.values():
            found = parts.objective(module(piece.rows["input_ids"]), piece.rows) / len(pieces)
            found.backward()
            mean += found.item()
        plain.append(mean)
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.1) if p.grad is not None else None
    expected, kept = {n: x.clone() for n, x in module.state_dict().items()}, habits.CALLS

    module = begin(kind)
    parts = parts_of(module, evaluate_every=1, checkpoint_every=0, sample_prompt="adg", sample_max_new_tokens=3)
    directory = run_alone(parts, tmp_path)
    records = [json.loads(line) for line in directory.records_file.read_text().splitlines()]
    assert [r["loss"] for r in records if r["kind"] == "step"] == pytest.approx(plain, rel=1e-6)
    assert len([r for r in records if r["kind"] == "evaluation"]) == STEPS
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert kept == habits.CALLS and "forward" not in vars(module.mix)
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
