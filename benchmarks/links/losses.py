"""The loss after so many tokens, in lockstep: all ranks in one process, the real exchanges, the real update rule.
Of islands that train apart, and from weights that are trained already: by `links.apart`.

It depends on the exchange, the number of hosts and the seed, and on no link: so it is measured once for all of them.
`python -m links.losses` reads one study as JSON from its input and prints what it found.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.local import LocalChannel, run_lockstep
from gossamer.comm.message import (
    Collective,
    ExchangeContext,
    ExchangeState,
    Message,
    Outcome,
    ProcessGroups,
    Rounds,
    Traffic,
)
from gossamer.data import valid_labels
from gossamer.exchange import Exchange, ExchangeTraits
from gossamer.ops.norm import global_norm_squared, scale_
from gossamer.optimizer import lr_schedule
from gossamer.optimizer.adamw import AdamW
from gossamer.recipe import ParameterRules
from gossamer.spec.plan import BUCKET_BYTES
from gossamer.sync import buckets_of
from links import apart, setting

FP16_HOOK = "fp16_hook"  # stands for an exchange: what torch's DDP does with it
EVERY_STEP = "every_step"
_EVALUATED, _EVALUATIONS, _AT_END = 64, 20, 512  # sequences; times in a run; sequences for the last loss


@dataclass(frozen=True, slots=True)
class Study:
    """One training run of so many tokens. `exchange` and `sync` as the plan section has them.

    `after`: tokens that all studies have behind them, trained together (`apart.common`); 0: random weights of `seed`.
    `beta2`: of AdamW.
    """

    exchange: Any
    hosts: int
    seed: int
    lr: float
    tokens: int
    islands: tuple[int, ...] = ()
    precision: str = "fp32"
    sync: Any = EVERY_STEP
    after: int = 0
    beta2: float = setting.BETAS[1]
    model: str = setting.GPT2

    def key(self) -> str:
        told = asdict(self)
        for field in fields(self):  # as it was written before there were others
            if field.name in ("sync", "after", "beta2", "model") and told[field.name] == field.default:
                del told[field.name]
        return json.dumps(told, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Fp16Hook(Exchange):
    """default_hooks.fp16_compress_hook: divide by the ranks, as halves; the all-reduce sums halves."""

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits()

    def init(self, layout: Layout) -> ExchangeState:
        return ExchangeState()

    def run(self, x: Bucket, state: ExchangeState, at: ExchangeContext) -> Rounds:
        (mean,) = yield Message((x.flat.half().div_(len(at.members)),), Collective.SUM)
        return Outcome(mean.to(x.layout.dtype), None, state)

    def traffic(self, layout: Layout, levels: ProcessGroups, rank: int) -> tuple[Traffic, ...]:
        return (Traffic(Collective.SUM, layout.numel, 2),)


class Crew:
    """All ranks of a study: one model, and for every rank its own gradients and exchange states."""

    def __init__(self, study: Study, device: torch.device) -> None:
        self.study, self.device = study, device
        self.module = setting.module(study.model, study.seed).to(device)
        self.params = dict(self.module.named_parameters())
        exchanges = self._exchanges()
        cut = buckets_of(self.params, exchanges, bucket_bytes=BUCKET_BYTES)
        self.levels = _levels(study)
        self.channels = LocalChannel.world(study.hosts, self.levels)
        ranks = range(study.hosts)
        self.buckets = [[layout.allocate() for layout, _ in cut] for _ in ranks]
        self.exchanges = [exchange for _, exchange in cut]
        self.states = [[exchange.init(layout) for layout, exchange in cut] for _ in ranks]

    def _exchanges(self) -> dict[str, Exchange]:
        if self.study.exchange == FP16_HOOK:
            return dict.fromkeys(self.params, Fp16Hook())
        return dict(ParameterRules.read(self.study.exchange).by_name(self.params))

    def compute(self, step: int) -> Tensor:
        """Every rank's gradients into its buckets; the ranks' shares of the batch."""
        labels = []
        for rank in range(self.study.hosts):
            for bucket in self.buckets[rank]:
                bucket.flat.zero_()
                for name, view in bucket.slices():
                    self.params[name].grad = view
            rows = setting.rows_of(step, rank, self.study.hosts, self.study.seed)
            self._loss({k: v.to(self.device) for k, v in rows.items()}).backward()  # type: ignore[no-untyped-call]
            labels.append(float(valid_labels(rows["labels"])))
        weights = torch.tensor(labels, dtype=torch.float64)
        return weights / weights.sum()

    def exchange(self, step: int, shares: Tensor, factor: float) -> dict[str, Tensor]:
        """The mean gradients, by name."""
        found: dict[str, Tensor] = {}
        for b, one in enumerate(self.exchanges):
            rounds = [
                one.run(mine[b], states[b], ExchangeContext(r, self.levels, shares, (self.study.seed, step), factor))
                for r, (mine, states) in enumerate(zip(self.buckets, self.states, strict=True))
            ]
            outcomes = run_lockstep(self.channels, rounds)
            for states, outcome in zip(self.states, outcomes, strict=True):
                states[b] = outcome.state
            found.update(Bucket(self.buckets[0][b].layout, outcomes[0].mean).slices())
        return found

    def _loss(self, rows: dict[str, Tensor]) -> Tensor:
        return loss_of(self.module, rows, self.study.precision)


def loss_of(module: nn.Module, rows: dict[str, Tensor], precision: str) -> Tensor:
    """On the device that the rows are on."""
    device = next(iter(rows.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        loss: Tensor = module(**rows).loss
    return loss


@torch.no_grad()
def evaluate(module: nn.Module, device: torch.device, precision: str, sequences: int = _EVALUATED) -> float:
    """Mean validation loss over the same sequences for every study."""
    split = setting.corpus().validation
    total = weight = 0.0
    for first in range(0, sequences, 8):
        rows = split.batch(np.arange(first, first + 8) * (len(split) // sequences))
        labels = float(valid_labels(rows["labels"]))
        total += float(loss_of(module, {k: v.to(device) for k, v in rows.items()}, precision)) * labels
        weight += labels
    return total / weight


def train(study: Study) -> dict[str, Any]:
    """The validation losses on the way, [tokens, loss], and the last one, over more sequences."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if study.after or study.sync != EVERY_STEP:
        return apart.train(study, lambda module: evaluate(module, torch.device("cpu"), study.precision, _AT_END))
    crew, began = Crew(study, device), time.perf_counter()
    rule = AdamW(lr=study.lr, betas=(setting.BETAS[0], study.beta2), weight_decay=setting.WEIGHT_DECAY)
    state, schedule = rule.init(crew.params), lr_schedule.build({"cosine": {"warmup": 0.05}})
    each = setting.tokens(study.hosts)
    steps = max(2, math.ceil(study.tokens / each))
    every, curve = max(1, steps // _EVALUATIONS), []
    for step in range(steps):
        factor = schedule.factor(step, steps)
        with torch.no_grad():
            shares = _grad(crew, step)
            grads = crew.exchange(step, shares, factor)
            norm = math.sqrt(float(global_norm_squared(list(grads.values()))))
            if norm > setting.CLIP:
                scale_(list(grads.values()), setting.CLIP / (norm + 1e-6))
            rule.update(crew.params, grads, state, lr_scale=factor, step=step)
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append([(step + 1) * each, evaluate(crew.module, device, study.precision)])
    final = evaluate(crew.module, device, study.precision, _AT_END)
    return {"curve": curve, "final": final, "seconds": time.perf_counter() - began, "device": device.type}


@torch.enable_grad()
def _grad(crew: Crew, step: int) -> Tensor:
    return crew.compute(step)


def _levels(study: Study) -> ProcessGroups:
    if not study.islands:
        return ProcessGroups.flat(study.hosts)
    ends = np.cumsum((0, *study.islands)).tolist()
    return ProcessGroups.islands([range(a, b) for a, b in pairwise(ends)])


def crossing(curve: list[list[float]], target: float) -> float | None:
    """Tokens at which the loss first reached `target`, between two evaluations by their line; None where never."""
    before: list[float] | None = None
    for at, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return at
            return before[0] + (at - before[0]) * (before[1] - target) / (before[1] - loss)
        before = [at, loss]
    return None


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(sys.stdin.read())
    print("\n" + json.dumps(train(Study(**{**given, "islands": tuple(given["islands"])}))))


if __name__ == "__main__":
    main()
