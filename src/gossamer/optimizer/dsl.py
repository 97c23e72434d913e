"""DSL: dynamic sparse learning: embedding tables keep a fixed number of weights, and which ones follows the training.

Paper: Wang et al., Dynamic Sparse Learning: A Novel Paradigm for Efficient Recommendation, WSDM 2024, arXiv:2402.02855.
Equations, for a table of n elements with mask k, of which c = n - round(sparsity n) are 1, and update t = 1, 2, ...:
    w <- k * inner rule(w, k g)
    every `interval` updates before update number `steps`:
        x = floor(fraction (1 + cos(pi t / steps)) / 2 * min(c, n - c))
        prune: k = 0 at the x kept weights of least |w| ;   grow: k = 1 at the x elements of largest |g| where k = 0
Symbols: w table, g mean gradient of the update, before it is masked. The first mask is that of static_mask, drawn by
(seed, name, index). What is grown starts at 0, and so do its moments; what was just pruned may grow again. Ties, such
as rows without a gradient, are ordered by random words of (seed, name, t): all ranks choose alike, on any device.
State:   that of the inner rule, and 1 byte per element of a table.   Work: a selection over the table an exploration.
Good when: tables are most of a recommender. Not for: gradient clipping to a small norm, which counts masked elements.
Kernels here are dense: what is kept small is the number of weights that are not 0, at every step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.ops.splitmix import outputs
from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.optimizer import Optimizer, OptimizerState, is_coded
from gossamer.optimizer._masked import KEPT, Masked, first_masks, hold_at_zero
from gossamer.optimizer._patterns import check_found, check_patterns
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, positive

_LARGE = (1024, 256)  # a table so large has states in 8 bits where the inner rule has any


@dataclass(frozen=True, slots=True, kw_only=True)
class Dsl(Masked):
    """An optimizer that trains a changing part of every table: all but the fraction `sparsity`.

    `parameters`: regular expressions; parameters in whose name one is found are tables. `fraction`: part of the kept
    weights that the first exploration exchanges; `interval`: updates between explorations; `steps`: updates after which
    masks stay, such as three quarters of train.steps.
    """

    inner: Optimizer = field(default_factory=AdamW)
    sparsity: float = 0.5
    seed: int = 0
    parameters: tuple[str, ...] = ("embed",)
    fraction: float = 0.3
    interval: int = 100
    steps: int = 1000

    def __post_init__(self) -> None:
        below_one("sparsity", self.sparsity)
        below_one("fraction", self.fraction)
        positive("interval", self.interval)
        positive("steps", self.steps)
        check_patterns(self.parameters, "parameters")
        inner = self.inner
        coded = is_coded(inner.init({"w": torch.empty(_LARGE, device="meta")})["w"])
        if inner.sets_zeros or inner.owns_weights or inner.has_one_clip or inner.has_average or coded:
            do = "choose adamw or sgd"
            wanted = "an inner optimizer of single parameters, with states that are 0 where a weight is new"
            raise bad_input(wanted=wanted, got=type(inner).__name__, do=do, key="inner")

    @property
    def first_mask(self) -> StaticMaskDraw:
        """Return how the masks of the first update are drawn."""
        return StaticMaskDraw(sparsity=self.sparsity, seed=self.seed, parameters=self.parameters)

    @property
    def by_element(self) -> bool:
        return False  # the least of a table is chosen among all of its rows

    def check(self, names: Collection[str]) -> None:
        self.inner.check(names)
        check_found(self.parameters, names, "train.optimizer.dsl.parameters")

    def said(self, shapes: Mapping[str, tuple[int, ...]], *, flop_per_token: float) -> str:
        tables = {name: shape for name, shape in shapes.items() if self.first_mask.covers(name, shape)}
        kept = sum(self.first_mask.kept_count(name, shape) for name, shape in tables.items())
        whole = sum(math.prod(shape) for shape in tables.values())
        return f"dsl: {kept:,} of {whole:,} weights in {len(tables)} tables are trained at a time, the others are 0"

    def prepare(self, params: Mapping[str, Tensor]) -> None:
        self.inner.prepare(params)
        hold_at_zero(params, self.first_mask)

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        return first_masks(self.inner.init_rows(rows, shapes, starts), rows, shapes, starts, self.first_mask)

    def remask(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: OptimizerState, *, update: int
    ) -> None:
        """Explore where that is due."""
        if update % self.interval or update >= self.steps:
            return
        ratio = self.fraction * (1 + math.cos(math.pi * update / self.steps)) / 2
        for name, grad in grads.items():
            if KEPT in state[name]:
                self._explore(params[name].detach(), grad, state[name], ratio, (self.seed, name, update))

    def _explore(
        self, param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], ratio: float, key: tuple[int, str, int]
    ) -> None:
        """Prune the weakest weights of a table, and grow as many where the gradient is largest."""
        kept = slots[KEPT].view(torch.bool).clone()
        count = int(kept.sum())
        moved = math.floor(ratio * min(count, kept.numel() - count))
        words = outputs(_seed(key), 0, kept.numel(), param.device)
        flat = kept.view(-1)
        flat[_largest(-param.abs().float().reshape(-1), flat, moved, words)] = False
        for one in (param, *(slot for name, slot in slots.items() if name != KEPT and slot.shape == param.shape)):
            one.masked_fill_(~kept, 0)
        flat[_largest(grad.abs().float().reshape(-1), ~flat, moved, words)] = True
        slots[KEPT].copy_(kept)


def _largest(values: Tensor, among: Tensor, count: int, words: Tensor) -> Tensor:
    """Return the `count` indices of largest value where `among` holds; of equal values those of the least words."""
    places = among.nonzero().flatten()
    order = places[words[places].argsort()]  # words are distinct
    return order[values[order].argsort(descending=True, stable=True)[:count]]


def _seed(key: tuple[int, str, int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(("dsl", *key)).encode(), digest_size=8).digest(), "big")
