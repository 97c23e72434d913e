"""Wrapper: an optimizer around another one, of which it changes a part and hands on all the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from gossamer.ops.static_mask import StaticMaskDraw
from gossamer.optimizer import LayerVectors, Optimizer, OptimizerState


class Wrapper(Optimizer):
    """An optimizer whose states are those of `inner`; what a subclass does not override is the inner optimizer's."""

    inner: Optimizer

    @property
    def lr(self) -> float:
        return self.inner.lr

    @property
    def slots(self) -> tuple[str, ...]:
        return self.inner.slots

    @property
    def made_by(self) -> str:
        return self.inner.made_by

    @property
    def by_element(self) -> bool:
        return self.inner.by_element

    @property
    def by_parameter(self) -> bool:
        return self.inner.by_parameter

    @property
    def has_one_clip(self) -> bool:
        return self.inner.has_one_clip

    @property
    def can_start_local(self) -> bool:
        return self.inner.can_start_local

    @property
    def remark(self) -> str:
        return self.inner.remark

    @property
    def counts_each(self) -> bool:
        return self.inner.counts_each

    @property
    def has_average(self) -> bool:
        return self.inner.has_average

    def average(self, params: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        return self.inner.average(params, state)

    @property
    def sets_zeros(self) -> bool:
        return self.inner.sets_zeros

    @property
    def owns_weights(self) -> bool:
        return self.inner.owns_weights

    @property
    def mask(self) -> StaticMaskDraw | None:
        return self.inner.mask

    def said(self, shapes: Mapping[str, tuple[int, ...]], *, flop_per_token: float) -> str:
        return self.inner.said(shapes, flop_per_token=flop_per_token)

    def prepare(self, params: Mapping[str, Tensor]) -> None:
        self.inner.prepare(params)

    def restrict(self, grads: Mapping[str, Tensor], state: OptimizerState) -> None:
        self.inner.restrict(grads, state)

    @property
    def keeps_masks(self) -> bool:
        return self.inner.keeps_masks

    def flop(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        return self.inner.flop(shapes)

    def check(self, names: Collection[str]) -> None:
        self.inner.check(names)

    def guessed(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        return self.inner.guessed(shapes)

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return self.init_rows(params, {name: tuple(param.shape) for name, param in params.items()})

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        return self.inner.init_rows(rows, shapes, starts)

    def wants_vectors(self, params: Mapping[str, Tensor]) -> Collection[str]:
        return self.inner.wants_vectors(params)

    def see(self, vectors: Mapping[str, LayerVectors], state: OptimizerState) -> None:
        self.inner.see(vectors, state)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        self.inner.meet(params, moved, state, rates=rates)

    def second_moments(self, state: OptimizerState, *, step: int) -> Mapping[str, Tensor]:
        return self.inner.second_moments(state, step=step)

    def learn(self, squares: Mapping[str, Tensor], state: OptimizerState) -> None:
        self.inner.learn(squares, state)
