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
On islands (m islands of k ranks, d numbers in float32), with a partition of three levels. Per rank and step, bytes
between islands, and bytes per parameter of weights, gradients, and AdamW's state:
    weights  states   gathers            gradients          updated rows       held
    all      all      4 (n-1)/n d/k G    4 (m-1)/m d        none               4/n + 4/n + 8/n
    island   all      none               4 (m-1)/m d/k      4 (m-1)/m d/k      4/k + 4/n + 8/n
    island   island   none               8 (m-1)/m d/k      none               4/k + 4/k + 8/k
where G d numbers are gathered in a step. The rows of a state lie in those of the weights: after an update counterparts
on the islands tell each other what they have updated of their rows; all else comes inside an island, when a unit runs,
in 4 (k-1)/k d G bytes. Of every island as many ranks hold rows as the smallest has, the others none.
Paper:   Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, stage 3; Zhao et al., PyTorch FSDP, VLDB 2023, arXiv
2304.11277. Levels: Xu et al., arXiv 2501.04266 (weights innermost, states over all); hpZ of Wang et al., ZeRO++, arXiv
2306.10209.

Hooks of our own and not torch's fully_shard with its collectives replaced: parameters stay what they are, by name and
by rows, for rules, exchanges with state, tied and frozen ones, checkpoints and the agreement before an update, where
fully_shard makes DTensors of its own default process group of them; its reduce-scatter may not return before it is done
on the CPU, and so cannot go on beside backward; and its order of messages is not one with ours. What it has and this
has not: it gathers in the type of mixed precision.
Unlike the papers: units are those of the plan, the model's blocks. What a unit holds and others read (seen in one
forward before the first step) is gathered for the whole step. The next unit is on its way while one runs. hpZ has the
weights twice, over all ranks for forward and on each node for backward, and makes the second out of the first; here an
island's are all there are, and none is gathered from outside in forward either. Updated rows cross as they are, where
the paper of the levels codes them.
Limits:  all ranks must run the same units in the same order, in as many micro-batches; what autocast makes of a
parameter is kept for backward as ever. With weights over all ranks, on islands too, gradients and parameters go in one
hop, and cross the slow links as often as there are ranks behind them. Updated rows are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.sharding import Sharding
from gossamer.sharding.zero1 import Zero1
from gossamer.spec.errors import bad_input


@dataclass(frozen=True, slots=True)
class Zero3(Sharding):
    """Sharded parameters, gradients and optimizer states (ZeRO stage 3).

    `weights_group`: sharded over `all` ranks with the same parameters, or inside each `island` (hybrid sharding).
    `states_group`: optimizer states and gradients sharded over `all`, or with weights inside an island also inside each
    `island`. `whole`: as in zero1.
    """

    weights_group: Literal["all", "island"] = "all"
    states_group: Literal["all", "island"] = "all"
    whole: bool = False

    def __post_init__(self) -> None:
        if self.states_group == "island" and self.weights_group == "all":
            raise bad_input(
                wanted="weights_group: island with states_group: island, as a rank updates only rows that it holds",
                got="weights_group: all",
                do="set weights_group: island too, or use {zero1: {shard_group: island}}",
                key="states_group",
            )

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def gives_back(self) -> bool:
        return True

    @property
    def takes_parameters(self) -> bool:
        return True

    @property
    def by_parameter(self) -> bool:
        return self.whole

    @property
    def needs_islands(self) -> bool:
        return self.weights_group == "island"

    def path(self, levels: ProcessGroups) -> tuple[str, ...]:
        if self.weights_group == "all" or "island" not in levels.groups:
            return ("all",)
        return ("island",) if self.states_group == "island" else ("island", "between")

    def exchange(self, given: Exchange, path: Sequence[str]) -> Exchange:
        return Zero1(whole=self.whole).exchange(given, path)
