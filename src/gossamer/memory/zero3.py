"""Zero3: parameters, gradients and the update rule's state by rows; a unit's parameters are gathered when it runs (ZeRO
stage 3, fully sharded data parallelism).

Equations: those of zero1; the parameters of unit k are w = (w[0], ..., w[n-1]) on all ranks while it runs, forward and
backward.
Wire:    gradients as in zero2, once per step. Parameters: of each unit a GATHER of (n-1)/n for every forward and every
backward of a micro-batch, but for the two at either end, which are there already when the direction turns: of U units
in a row and M micro-batches 2 M (U - 2) + 2 unit gathers, and what is read outside of its unit once. It is all known
before the step.
State:   1/n of parameters, gradients and the rule's state: 16/n bytes per parameter with AdamW in float32, and a row of
each parameter at most. While it computes: two units, and what is read outside of its unit (tied embeddings).
Paper:   Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, stage 3; Zhao et al., PyTorch FSDP, VLDB 2023, arXiv
2304.11277.

Hooks of our own and not torch's fully_shard with its collectives replaced: parameters stay what they are, by name and
by rows, for rules, exchanges with state, tied and frozen ones, checkpoints and the agreement before an update, where
fully_shard makes DTensors of its own default process group of them; its reduce-scatter may not return before it is done
on the CPU, and so cannot go on beside backward; and its order of messages is not one with ours. What it has and this
has not: it gathers in the type of mixed precision.
Unlike the papers: units are those of the plan, the model's blocks. What a unit holds and others read (seen in one
forward before the first step) is gathered for the whole step. The next unit is on its way while one runs.
Limits:  all ranks must run the same units in the same order, in as many micro-batches; what autocast makes of a
parameter is kept for backward as ever. On islands too, rows are dealt out over all ranks at once: gradients and
parameters go in one hop, and cross the slow links as often as there are ranks behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.compress import Exchange
from gossamer.memory import Sharding
from gossamer.memory.zero1 import Zero1
from gossamer.wire.message import Levels


@dataclass(frozen=True, slots=True)
class Zero3(Sharding):
    """Over all ranks that hold the same parameters."""

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def gives_back(self) -> bool:
        return True

    @property
    def takes_parameters(self) -> bool:
        return True

    def path(self, levels: Levels) -> tuple[str, ...]:
        return ("all",)

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        return Zero1().exchange(given, path)
