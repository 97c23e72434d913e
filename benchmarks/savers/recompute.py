"""Recompute within budgets of bytes: peaks of activations as planned on shapes alone, and as the allocator counts.

A model like GPT-2 trains a few steps of one micro-batch: plainly, with all blocks recomputed, and with the set that two
budgets between them ask for. Before every measured step parameters have gradients, so that these are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import nn

from gossamer import loss
from gossamer.model.ghost_step import ghost_of_units
from gossamer.model.precision import precision_of
from gossamer.model.source.hf import Hf
from gossamer.partition.model_provider import ModuleSource
from gossamer.partition.rank_model import planned
from gossamer.partition.request import PartitionRequest
from gossamer.partition.saver_choice import saving
from gossamer.recipe import PlanMethods
from gossamer.run.batches import Batches, DatasetBatches
from gossamer.run.engine import engine_of
from gossamer.run.parts import Parts
from gossamer.run.staged_model import Forward
from gossamer.saver.recompute import Recompute
from gossamer.spec.config import RunConfig
from gossamer.spec.plan import Plan
from savers import Row
from savers._allocator import allocator_peak
from savers._resident import resident_peak

_SIZES = {"n_embd": 384, "n_layer": 10, "n_head": 6}
_VOCABULARY, _SEQUENCE, _ROWS = 8192, 128, 4
_CPU = torch.device("cpu")
_GPT2 = Hf("gpt2", {**_SIZES, "n_positions": _SEQUENCE})


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Rows of plain training, of all blocks recomputed, and of two budgets between them."""
    steps = 2 if quick else 5
    plain = measured([], "plain training", steps, peer="plain")
    least = measured(["recompute"], "all blocks", steps)
    yield plain
    yield least
    assert plain.planned_peak_bytes is not None and least.planned_peak_bytes is not None
    for share in (0.3, 0.7):
        budget = least.planned_peak_bytes + share * (plain.planned_peak_bytes - least.planned_peak_bytes)
        yield measured([{"recompute": {"budget": f"{budget:.0f}B"}}], f"budget {budget / 2**20:.0f} MiB", steps)


def measured(
    savers: list[Any],
    what: str,
    steps: int,
    *,
    peer: str = "",
    method: str = "recompute",
    model: Hf = _GPT2,
    precision: str = "fp32",
    is_resident: bool = False,
) -> Row:
    """Return the row of some savers: peak of activations as planned and as measured, seconds of a step, loss.

    `is_resident`: the peak is one of resident memory, as the profiler sees no allocation of another thread.
    """
    module = model.fitted_to_tokenizer(_VOCABULARY, _SEQUENCE).build(0)
    config = RunConfig.model_validate(
        {
            "train": {"batch": _ROWS, "accumulate": 1, "precision": precision},
            "plan": {"savers": savers},
            "machines": {"threads": 1},
        }
    )
    objective, data = loss.build("next_token"), _data()
    asked = PartitionRequest(config=config, ranks=1, rank=0, batches=data, objective=objective, device=_CPU)
    plan = planned(ModuleSource(module), asked).plan
    methods, batch = PlanMethods.of(plan), data.batch(data.first(_ROWS))
    forward = Forward(objective, precision_of(precision), _CPU)
    ghost = ghost_of_units(module, saving(forward, methods.savers, units=plan.units, batch=batch), plan.units)
    peak, seconds, last = _trained(module, config, plan, data, steps, is_resident=is_resident)
    told = "resident memory" if is_resident else "the events of torch's CPU allocator"
    parameters = sum(p.numel() for p in module.parameters())
    return Row(
        method=method,
        peer=peer,
        setting=f"{what}; {model.of} of {parameters / 1e6:.1f} M parameters, {_ROWS} x {_SEQUENCE} tokens, "
        f"{precision}, one thread; peak of a forward and backward pass by {told}",
        peak_bytes=peak,
        planned_peak_bytes=ghost.peak,
        step_s=round(seconds, 4),
        loss=round(last, 6),
        details={"peak_of_plan": round(peak / ghost.peak, 4), "recomputed": _units(methods, module, plan)},
    )


def _units(methods: PlanMethods, module: nn.Module, plan: Plan) -> list[str]:
    chosen = (one.chosen(module, plan.units) for one in methods.savers if isinstance(one, Recompute))
    return [name for names in chosen for name in names]


def _trained(
    module: nn.Module, config: RunConfig, plan: Plan, data: Batches, steps: int, *, is_resident: bool
) -> tuple[int, float, float]:
    """Return the peak of the last step above what was there before it, median seconds of a step, and the last loss."""
    torch.set_num_threads(1)
    parts = Parts(
        module=module,
        objective=loss.build("next_token"),
        train=data,
        validation={},
        config=config,
        plan=plan,
        device=_CPU,
    )
    engine = engine_of(parts)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    seconds, last = [], 0.0

    def one(step: int) -> None:
        nonlocal last
        found = engine.loss(data.batch(data.first(_ROWS)), step=step, key=0)
        with engine.randomness.at(step, 0):
            found.backward()  # type: ignore[no-untyped-call]
        last = float(found.detach())

    for step in range(1 + steps):
        began = time.perf_counter()
        one(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.perf_counter() - began)
    if is_resident:
        return resident_peak(lambda: one(1 + steps)), median(seconds[1:]), last
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watch:
        one(1 + steps)
    return allocator_peak(watch), median(seconds[1:]), last


def _data() -> Batches:
    ids = torch.randint(0, _VOCABULARY, (_ROWS, _SEQUENCE), generator=torch.Generator().manual_seed(0))
    return DatasetBatches([{"input_ids": row, "labels": row.clone()} for row in ids])
