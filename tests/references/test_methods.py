"""Every method of sync, optim and memory against its equations: whole runs over gloo, and float64."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest

from pool import Pool
from references.exchanges import Feedback, Momentum, TopK, TwoShot, WarmUp, sign
from references.loops import Apart, Co2, Cser, Gossip, OneByte, Rules, ZeroOne, together
from references.outer import Average, Hypergradient, Nesterov, SignMomentum, SlowMomentum, StaleMomentum
from references.rules import (
    AdamW,
    CommonAdamW,
    Lamb,
    Lans,
    Lars,
    Muon,
    OneBitAdam,
    OneBitLamb,
    ProximalMcp,
    ProximalRows,
    Sgd,
    ZeroOneAdam,
)
from references.task import WARMUP, Task, Vector

Reference = Callable[[Task], Vector]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run of so many `rows` per rank, and what it must come to. `rule`: what is written of train.optimizer."""

    rule: dict[str, Any]
    to: Reference
    plan: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = (5, 3)
    islands: tuple[tuple[int, ...], ...] = ()
    train: dict[str, Any] = field(default_factory=dict)
    steps: int = 12
    clip: float = 0.5
    frozen: tuple[str, ...] = ()
    within: float = 1e-5

    @property
    def task(self) -> Task:
        ((_, fields),) = self.rule.items()
        lr = fields["lr"] if "lr" in fields else fields["inner"]["sgd"]["lr"]
        return Task(rows=self.rows, lr=lr, steps=self.steps, clip=self.clip, frozen=self.frozen)

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        share = {"batch_fractions": list(self.rows)}
        train = {"batch": sum(self.rows), "max_grad_norm": self.clip, "optimizer": self.rule}
        train["lr_schedule"] = {"cosine": {"warmup": WARMUP}}
        machines = {"islands": [list(one) for one in self.islands]} if self.islands else {}
        return {"plan": {**share, **self.plan}, "train": {**train, **self.train}, "machines": machines}


SGD = {"sgd": {"lr": 0.1}}
ADAM = {"adamw": {"lr": 0.01}}
TIERS = {
    "tiers": {**dict.fromkeys(("device", "host", "file"), "64MB"), "directory": f"{gettempdir()}/tiers-{os.getpid()}"}
}
DIVIDED = {"tiers": {**TIERS["tiers"], "shard_group": "all"}}
WHOLE = {"zero1": {"whole": True}}
MUON = {"muon": {"lr": 0.02, "rest": {"adamw": {"lr": 0.01}}}}
ALONE = ((0,), (1,))
PAIRS = ((0, 1), (2, 3))


def proximal(operator: dict[str, Any]) -> dict[str, Any]:
    return {"proximal": {"inner": SGD, "operator": operator}}


def every_step(rule: Rules = AdamW, exchange: Any = None) -> Reference:
    return lambda task: together(task, rule, exchange() if exchange else None)


def apart(loop: Any, rule: Rules = AdamW, groups: Sequence[Sequence[int]] = ALONE) -> Reference:
    return lambda task: loop.run(task, groups, rule)


def synced(name: str, **fields: Any) -> dict[str, Any]:
    return {"sync": {name: fields}}


SIGNS = {"error_feedback": {"two_shot": "sign"}}
TOP = {"topk": {"fraction": 0.2}}
MOMENTUM = {"momentum": {"inner": {"warmup": {"steps": 5, "inner": {"error_feedback": {
    "inner": {"two_shot": "sign"}, "track_lr": False}}}}}}  # fmt: skip


def one_bit() -> Momentum:
    return Momentum(WarmUp(Feedback(TwoShot(sign), track_lr=False), 5))


HALVES = (("layers.0", "embed"), ("layers.1", "norm"))
THIRDS = (("layers.0",), ("layers.1",), ("embed", "norm"))

TABLE: dict[str, Row] = {
    # All gradients meet at every step.
    "sgd": Row(rule=SGD, to=every_step(Sgd), clip=0.0),
    "sgd with momentum": Row(
        rule={"sgd": {"lr": 0.05, "momentum": 0.9}}, to=every_step(partial(Sgd, momentum=0.9)), rows=(4, 4)
    ),
    "adamw, two micro-batches": Row(rule=ADAM, to=every_step(), train={"accumulate": 2}),
    "adamw, frozen layers": Row(rule=ADAM, to=every_step(), frozen=("layers.0", "norm")),
    "lamb": Row(rule={"lamb": {"lr": 0.02}}, to=every_step(Lamb)),
    "lans": Row(rule={"lans": {"lr": 0.02}}, to=every_step(Lans)),
    "lars": Row(rule={"lars": {"lr": 1.0, "trust_coefficient": 0.02}}, to=every_step(Lars)),
    "muon": Row(rule=MUON, to=every_step(Muon)),
    "muon, zero1": Row(rule=MUON, to=every_step(Muon), plan={"sharding": WHOLE}),
    "muon, zero2": Row(rule=MUON, to=every_step(Muon), plan={"sharding": {"zero2": {"whole": True}}}, rows=(3, 2, 3)),
    "muon, zero3": Row(
        rule=MUON, to=every_step(Muon), plan={"sharding": {"zero3": {"whole": True}}}, rows=(4, 4), frozen=("norm",)
    ),
    "muon, zero2 on islands": Row(
        rule=MUON, to=every_step(Muon), plan={"sharding": {"zero2": {"whole": True}}}, rows=(3, 2, 2, 1),
        islands=PAIRS,
    ),
    "muon, zero3 on islands": Row(
        rule=MUON, to=every_step(Muon), plan={"sharding": {"zero3": {"whole": True, "weights_group": "island"}}},
        rows=(2, 2, 2, 2), islands=PAIRS,
    ),
    "lamb, zero1": Row(
        rule={"lamb": {"lr": 0.02}}, to=every_step(Lamb), plan={"sharding": WHOLE}, rows=(4, 4)
    ),
    "proximal, mcp, zero2": Row(
        rule=proximal({"mcp": {"strength": 0.05}}), to=every_step(ProximalMcp), plan={"sharding": "zero2"},
        rows=(3, 2, 3),
    ),
    "proximal, mcp, zero3": Row(
        rule=proximal({"mcp": {"strength": 0.05}}), to=every_step(ProximalMcp), plan={"sharding": "zero3"}, rows=(4, 4),
    ),
    "proximal, group lasso, zero1": Row(
        rule=proximal({"group_lasso": {"strength": 0.02}}), to=every_step(ProximalRows), plan={"sharding": WHOLE},
    ),
    "error feedback, topk": Row(rule=SGD, to=every_step(Sgd, lambda: Feedback(TopK(0.2))), plan={
        "exchange": {"error_feedback": TOP}}),
    "error feedback, signs": Row(rule={"sgd": {"lr": 0.5}}, to=every_step(Sgd, lambda: Feedback(TwoShot(sign))), plan={
        "exchange": SIGNS}),
    "1-bit adam: frozen": Row(
        rule={"one_bit_adam": {"lr": 0.01, "freeze_step": 5, "floor": 0.3}},
        to=every_step(partial(OneBitAdam, floor=0.3))
    ),
    "1-bit adam: signs": Row(
        rule={"one_bit_adam": {"lr": 0.01, "freeze_step": 5}}, to=every_step(OneBitAdam, one_bit), clip=0.0,
        plan={"exchange": MOMENTUM},
    ),
    "1-bit lamb: frozen": Row(
        rule={"one_bit_lamb": {"lr": 0.02, "freeze_step": 5, "floor": 0.3}},
        to=every_step(partial(OneBitLamb, floor=0.3)),
        steps=14,
    ),
    "1-bit lamb: wide limits": Row(
        rule={"one_bit_lamb": {
            "lr": 0.02, "betas": [0.9, 0.9], "freeze_step": 4, "factor_threshold": 0.9, "floor": 0.5,
            "factor_min": 0.1}},
        to=every_step(partial(OneBitLamb, b2=0.9, freeze=4, change=0.9, floor=0.5, least=0.1)), steps=14,
    ),
    "1-bit lamb: signs": Row(
        rule={"one_bit_lamb": {"lr": 0.02, "freeze_step": 5}}, to=every_step(OneBitLamb, one_bit), clip=0.0,
        plan={"exchange": MOMENTUM},
    ),
    "1-bit adam: signs, zero1": Row(
        rule={"one_bit_adam": {"lr": 0.01, "freeze_step": 5}}, to=every_step(OneBitAdam, one_bit), clip=0.0,
        plan={"exchange": MOMENTUM, "sharding": WHOLE},
    ),
    "1-bit lamb: signs, zero1": Row(
        rule={"one_bit_lamb": {"lr": 0.02, "freeze_step": 5}}, to=every_step(OneBitLamb, one_bit), clip=0.0,
        plan={"exchange": MOMENTUM, "sharding": WHOLE},
    ),
    "lans, zero1": Row(rule={"lans": {"lr": 0.02}}, to=every_step(Lans), plan={"sharding": WHOLE}),
    "just one byte": Row(
        rule={"sgd": {"lr": 0.1}}, to=OneByte(2, 1e-2).run, clip=1.5,
        plan=synced("just_one_byte", directions=2, epsilon=1e-2),
    ),
    # Where the state lies changes nothing.
    "zero1": Row(rule=ADAM, to=every_step(), plan={"sharding": "zero1"}),
    "zero2": Row(rule=ADAM, to=every_step(), plan={"sharding": "zero2"}, frozen=("layers.1",)),
    "zero3": Row(rule=ADAM, to=every_step(), plan={"sharding": "zero3"}, rows=(4, 4)),
    "zero1 on islands": Row(
        rule=ADAM, to=every_step(), plan={"sharding": {"zero1": {"shard_group": "island"}}}, islands=PAIRS,
        rows=(3, 2, 1, 2)
    ),
    "zero1 in two hops": Row(rule=ADAM, to=every_step(), plan={"sharding": "zero1"}, islands=PAIRS, rows=(3, 2, 1, 2)),
    "tiers": Row(rule=ADAM, to=every_step(), plan={"sharding": TIERS}, rows=(8,)),
    "tiers on several ranks": Row(
        rule=ADAM, to=every_step(), plan={"sharding": TIERS}, rows=(3, 2, 1, 2), frozen=("layers.1",)
    ),
    "tiers, divided": Row(
        rule=ADAM, to=every_step(), plan={"sharding": DIVIDED}, rows=(3, 2, 1, 2), frozen=("layers.1",)
    ),
    "tiers, frozen": Row(rule=ADAM, to=every_step(), plan={"sharding": TIERS}, rows=(8,), frozen=("layers.1",)),
    "zero3, weights on islands": Row(
        rule=ADAM, to=every_step(), plan={"sharding": {"zero3": {"weights_group": "island"}}}, islands=PAIRS,
        rows=(2, 2, 2, 2)
    ),
    "zero3, all on islands": Row(
        rule=ADAM, to=every_step(), plan={"sharding": {"zero3": {"weights_group": "island", "states_group": "island"}}},
        islands=PAIRS, rows=(2, 2, 2, 2),
    ),
    "sdp4bit without codes": Row(
        rule=ADAM, to=every_step(), plan={"sharding": {"sdp4bit": {"weights": None, "gradients": None}}}
    ),
    # Islands.
    "local_sgd": Row(rule=SGD, to=apart(Apart(Average, 4), Sgd), plan=synced("local_sgd", sync_every=4), steps=13),
    "local_sgd after 4": Row(
        rule=ADAM, to=apart(Apart(Average, 3, start=4)), plan=synced("local_sgd", sync_every=3, warmup_steps=4),
        steps=13,
        train={"accumulate": 2},
    ),
    "local_sgd on islands of two and one, zero1": Row(
        rule=ADAM, to=apart(Apart(Average, 4), groups=((0, 1), (2,))), islands=((0, 1), (2,)), rows=(2, 3, 3),
        plan={**synced("local_sgd", sync_every=4), "sharding": {"zero1": {"shard_group": "island"}}},
    ),
    "qsparse": Row(
        rule=SGD, to=apart(Apart(Average, 3, exchange=lambda: Feedback(TopK(0.2))), Sgd),
        plan=synced("local_sgd", sync_every=3, exchange={"error_feedback": TOP}),
    ),
    "diloco, frozen layers": Row(
        rule=ADAM, to=apart(Apart(Nesterov, 4)), plan=synced("diloco", sync_every=4), steps=13, frozen=("layers.0",)
    ),
    "muloco": Row(
        rule=MUON, to=apart(Apart(Nesterov, 4), Muon), steps=13, plan=synced("diloco", sync_every=4)
    ),
    "streaming diloco": Row(
        rule=ADAM, to=apart(Apart(partial(Nesterov, lr=0.4), 6, HALVES, delay=2, mix=0.5)), steps=14,
        plan=synced("streaming_diloco", sync_every=6, fragments=2, sync_delay=2, exchange="dense"),
    ),
    "diloco, carried": Row(
        rule=ADAM, to=apart(Apart(Nesterov, 5, THIRDS, delay=1, carry=True, start=2)), steps=15,
        plan=synced("diloco", sync_every=5, fragments=3, sync_delay=1, keep_local_progress=True, warmup_steps=2),
    ),
    "dasgd": Row(rule=ADAM, to=apart(Apart(Average, 4, delay=2, carry=True)),
        plan=synced("dasgd", sync_every=4), steps=14),
    "slowmo": Row(
        rule=SGD, to=apart(Apart(partial(SlowMomentum, lr=0.5, beta=0.9), 3), Sgd),
        plan=synced("slowmo", sync_every=3, outer_optimizer={"slow_momentum": {"lr": 0.5, "momentum": 0.9}}),
    ),
    "dsm": Row(
        rule=ADAM, to=apart(Apart(partial(SignMomentum, lr=2.0, b1=0.8, b2=0.9, decay=0.5), 3)),
        plan=synced("dsm", sync_every=3,
        outer_optimizer={"sign_momentum": {"lr": 2.0, "b1": 0.8, "b2": 0.9, "weight_decay": 0.5}}),
    ),
    "fedhyper, outer": Row(
        rule=SGD, to=apart(Apart(Hypergradient, 2), Sgd), plan=synced("fedhyper", sync_every=2)
    ),
    "fedhyper, inner": Row(
        rule=SGD, to=apart(Apart(partial(Hypergradient, inner=True, kappa=0.5, high=1.2), 2), Sgd), plan=synced(
            "fedhyper", sync_every=2,
            outer_optimizer={"hypergradient": {"inner": "average", "of": "inner", "kappa": 0.5, "high": 1.2}}),
    ),
    "co2": Row(rule=SGD, to=apart(Co2(StaleMomentum, 3), Sgd), plan=synced("co2", sync_every=3), steps=14),
    "co2, clipped": Row(
        rule=ADAM, to=apart(Co2(partial(StaleMomentum, lr=0.8, gap=0.5, clip=0.01), 3)),
        plan=synced("co2", sync_every=3, outer_optimizer={"stale_momentum": {"lr": 0.8, "gap": 0.5, "clip": 0.01}}),
    ),
    "cser": Row(
        rule=SGD, to=apart(Cser(3, 0.1, 0.25), Sgd), steps=11,
        plan=synced("cser", sync_every=3, step_exchange={"topk": {"fraction": 0.1}},
        exchange={"topk": {"fraction": 0.25}}),
    ),
    "gossip on a ring": Row(
        rule=SGD, to=apart(Gossip(1, 4, 0.7), Sgd, ((0,), (1,), (2,))), rows=(3, 2, 3), steps=11,
        plan=synced("gossip", sync_every=1, global_sync_every=4, topology="ring", gamma=0.7),
    ),
    # A displacement below the last place of its parameter has any sign in float32, and one such number is off by what
    # a sign weighs. Of these rows and this rate none is; another kind of processor may round one the other way.
    "gossip in signs": Row(
        rule={"sgd": {"lr": 0.5}}, to=apart(Gossip(1, 4, 0.5, sign), Sgd, ((0,), (1,), (2,))), rows=(3, 2, 3), steps=11,
        plan=synced("gossip", sync_every=1, global_sync_every=4, topology="ring", gamma=0.5, codec="sign"), within=1e-3,
    ),
    "0/1 adam": Row(
        rule={"zero_one_adam": {"lr": 0.003, "floor": 0.2}},
        to=apart(ZeroOne(lambda: Feedback(TwoShot(sign)), (0, 1, 2, 4), 5, (6, 7, 9, 11, 14)),
                 partial(ZeroOneAdam, floor=0.2)),
        plan=synced("zero_one", local_step_clipper=3, var_freeze_step=5, var_update_scaler=2, local_step_scaler=2),
        steps=14,
    ),
    "second moments that meet": Row(
        rule={"adamw": {"lr": 0.01, "betas": [0.9, 0.95]}},
        to=apart(Apart(Average, 3, start=2, tells=(0, 1, 2, 3)), partial(CommonAdamW, part=0.5)), rows=(4, 4), steps=14,
        plan=synced("diloco", sync_every=3, warmup_steps=2, outer_optimizer="average", average_second_moments_every=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_run_is_its_equations(pool: Pool, name: str) -> None:
    row = TABLE[name]
    found = pool.run(
        "run.jobs:train", len(row.rows), steps=row.steps, frozen=list(row.frozen), values=True, sections=row.sections
    )
    assert len({one["digest"] for one in found}) == 1
    task, values = row.task, np.array(found[0]["values"])
    wanted = in_order_of_names(task, row.to(task))
    moved = np.abs(wanted - in_order_of_names(task, task.start())).max()
    off = np.abs(values - wanted).max()
    print(json.dumps({"row": name, "off": float(off), "moved": float(moved)}))
    assert moved > 0.02 and off < row.within


def in_order_of_names(task: Task, x: Vector) -> Vector:
    """As run.jobs says where parameters are: all of them, what is frozen too."""
    every, frozen = Task(rows=task.rows, lr=task.lr), task.spans()
    start, there = every.start(), every.spans()
    return np.concatenate([x[frozen[n][0]] if n in frozen else start[there[n][0]] for n in sorted(there)])
