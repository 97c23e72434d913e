"""StaticMask: a fixed random part of every weight matrix is held at exactly 0, and another optimizer moves the rest.

Paper: Thangarasa et al., SPDF: Sparse Pre-training and Dense Fine-tuning, UAI 2023, arXiv:2303.10464.
Equations, with k the mask of a matrix (1: trained, 0: masked; see ops.static_mask):
    w <- k w                           before the first step
    w <- k * inner rule(w, k g)        moments and decay of masked elements stay 0
Symbols: w parameter, g mean gradient. Every matrix has round(sparsity numel) zeros, drawn by (seed, name, index).
State:   that of the inner rule, and 1 byte per element of a masked matrix.   Work: 3 passes over masked matrices.
Good when: a model is pre-trained sparse and fine-tuned dense: export it, and train the export with the inner optimizer
alone; zeros then learn, with states from scratch. Kernels here are dense: the share of flop that the zeros would save
is said when a run starts, the seconds are not saved. What is saved is gradient traffic: plan.exchange static_mask.
Embeddings, heads, norms and biases have no mask. Clipping compares the norm of masked gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._masked import KEPT, Masked, clear, first_masks, hold_at_zero
from gossamer.optimizer._patterns import check_found, check_patterns
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.validate import below_one

_FLOP_PER_WEIGHT = 2  # and token, forward; backward has twice as many, of kept and masked weights alike
_PARAMETERS = "train.optimizer.static_mask.parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMask(Masked):
    """An optimizer that holds the fraction `sparsity` of every weight matrix at 0, drawn by `seed`.

    `parameters`: regular expressions; parameters in whose name one is found have a mask. By default these are
    parameters of two dimensions whose name does not look like that of an embedding, a head, a router or an adapter.
    `masks` start: no masks are drawn; those of the start folder that the model begins from are held.
    """

    inner: Optimizer = field(default_factory=AdamW)
    sparsity: float = 0.75
    seed: int = 0
    parameters: tuple[str, ...] = ()
    masks: Literal["random", "start"] = "random"

    def __post_init__(self) -> None:
        below_one("sparsity", self.sparsity)
        check_patterns(self.parameters, "parameters")
        if self.inner.mask is not None or self.inner.keeps_masks:
            do = "write one static_mask around the inner optimizer"
            raise bad_input(wanted="an inner optimizer without a mask", got="static_mask", do=do, key="inner")
        if self.inner.owns_weights:
            got, do = type(self.inner).__name__.lower(), "choose adamw, sgd or muon"
            raise bad_input(wanted="an optimizer that zeros of weights do not disturb", got=got, do=do, key="inner")
        if self.inner.has_one_clip:
            do = "choose adamw or sgd: its clip would count moves of masked weights"
            raise bad_input(
                wanted="an optimizer of single parameters", got=type(self.inner).__name__, do=do, key="inner"
            )

    @property
    def mask(self) -> StaticMaskDraw | None:
        return None if self.keeps_masks else self._draw

    @property
    def _draw(self) -> StaticMaskDraw:
        return StaticMaskDraw(sparsity=self.sparsity, seed=self.seed, parameters=self.parameters)

    @property
    def keeps_masks(self) -> bool:
        return self.masks == "start"

    def check(self, names: Collection[str]) -> None:
        self.inner.check(names)
        check_found(self.parameters, names, _PARAMETERS)

    def guessed(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        is_told = self.keeps_masks or bool(self.parameters)
        mine = {} if is_told else {name: _PARAMETERS for name, one in shapes.items() if self._draw.covers(name, one)}
        return {**self.inner.guessed(shapes), **mine}

    def said(self, shapes: Mapping[str, tuple[int, ...]], *, flop_per_token: float) -> str:
        if self.keeps_masks:
            return "static_mask: weights that the masks of the start folder leave out stay 0"
        draw = self._draw
        covered = {name: shape for name, shape in shapes.items() if draw.covers(name, shape)}
        if not covered:
            raise BadInput(
                "no trained parameter is a weight matrix outside of embeddings and heads: name those that get a mask",
                key=_PARAMETERS,
            )
        whole = sum(prod(shape) for shape in covered.values())
        zeros = whole - sum(draw.kept_count(name, shape) for name, shape in covered.items())
        told = f"static_mask: {zeros:,} of {whole:,} weights in {len(covered)} matrices stay 0"
        if not flop_per_token:
            return told
        share = 1 - _FLOP_PER_WEIGHT * zeros / flop_per_token
        return (
            f"{told}; kernels that skip them would take {100 * share:.1f} % of a step's flop (kernels here are dense)"
        )

    def prepare(self, params: Mapping[str, Tensor]) -> None:
        self.inner.prepare(params)
        if not self.keeps_masks:
            hold_at_zero(params, self._draw)

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        state = self.inner.init_rows(rows, shapes, starts)
        if not self.keeps_masks:
            return first_masks(state, rows, shapes, starts, self._draw)
        for name, own in rows.items():  # all are kept until the start folder says which are not
            if len(shapes[name]) > 1:
                state[name][KEPT] = torch.ones_like(own, dtype=torch.uint8, memory_format=torch.contiguous_format)
        return state

    @torch.no_grad()
    def restrict(self, grads: Mapping[str, Tensor], state: OptimizerState) -> None:
        clear(grads, grads, state)
