"""An optimizer of matrices, chosen by name, beside another one that moves all other parameters."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from functools import cache

import torch
from torch import Tensor

from gossamer.ops.static_mask import NO_LINEAR_LAYER
from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._foreach import chosen
from gossamer.optimizer._patterns import check_found
from gossamer.spec.errors import bad_input


class MatrixOptimizer(Optimizer):
    """An optimizer that moves matrices by `move`, and every other parameter by `rest`, which has a rate of its own.

    `matrices`: regular expressions of the names of matrices; empty: every parameter of two dimensions whose name does
    not look like that of an embedding, a head, a router or an adapter.
    """

    matrices: tuple[str, ...]
    rest: Optimizer

    @abstractmethod
    def matrix_slots(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the states of some rows of the matrix `name`, which has `shape` in all, before the first update."""

    @abstractmethod
    def move(
        self,
        matrices: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        """Update the matrices that have a gradient and elements, and their states, in place, as `update` does."""

    @property
    def made_by(self) -> str:
        name = type(self).__module__.rpartition(".")[2]
        which = f"matrices={list(self.matrices)}, " if self.matrices else ""
        return f"{name}({which}rest={self.rest.made_by})"

    @property
    def by_element(self) -> bool:
        return False

    @property
    def by_parameter(self) -> bool:
        return self.rest.by_parameter

    @property
    def can_start_local(self) -> bool:
        return self.rest.can_start_local

    @property
    def remark(self) -> str:
        return self.rest.remark

    @property
    def counts_each(self) -> bool:
        return self.rest.counts_each

    @property
    def sets_zeros(self) -> bool:
        return self.rest.sets_zeros

    def check(self, names: Collection[str]) -> None:
        self.rest.check([name for name in names if not names_matrix(self.matrices, name)])
        check_found(self.matrices, names, self._key)

    def guessed(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, str]:
        mine = {name: self._key for name, shape in shapes.items() if self.is_matrix(name, len(shape))}
        others = {name: shape for name, shape in shapes.items() if name not in mine}
        return {**self.rest.guessed(others), **({} if self.matrices else mine)}

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return self.init_rows(params, {name: tuple(param.shape) for name, param in params.items()})

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        matrices, others = self.split(rows)
        state = self.rest.init_rows(others, shapes, starts)
        for name, own in matrices.items():
            state[name] = self.matrix_slots(name, own, shapes[name])
        return {name: state[name] for name in rows}

    @torch.no_grad()
    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        others = self._moved(params, grads, state, lr_scale=lr_scale, step=step)
        self.rest.update(others, chosen(others, grads), state, lr_scale=lr_scale, step=step)

    @torch.no_grad()
    def update_apart(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        others = self._moved(params, grads, state, lr_scale=lr_scale, step=step)
        self.rest.update_apart(others, chosen(others, grads), state, lr_scale=lr_scale, step=step)

    def meet(
        self, params: Mapping[str, Tensor], moved: Mapping[str, Tensor], state: OptimizerState, *, rates: float
    ) -> None:
        _, others = self.split(params)
        self.rest.meet(others, chosen(others, moved), state, rates=rates * self.rest.lr / self.lr)

    def second_moments(self, state: OptimizerState, *, step: int) -> Mapping[str, Tensor]:
        others = {name: slots for name, slots in state.items() if not self._is_matrix_of(name, slots)}
        return self.rest.second_moments(others, step=step)

    def learn(self, squares: Mapping[str, Tensor], state: OptimizerState) -> None:
        self.rest.learn(squares, state)

    def split(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the matrices, and all others."""
        matrices = {name: param for name, param in params.items() if self.is_matrix(name, param.ndim)}
        return matrices, {name: param for name, param in params.items() if name not in matrices}

    def is_matrix(self, name: str, ndim: int) -> bool:
        """Return whether a parameter is moved as a matrix; raise BadInput for one that is named so and is none."""
        is_named = names_matrix(self.matrices, name)
        if self.matrices and is_named and ndim != 2:
            raise bad_input(
                wanted=f"matrices, which have two dimensions, in {self._key} ({self.matrices})",
                got=f"{name} with {ndim}",
                do="write patterns that are found in the names of matrices only",
                key=self._key,
            )
        return is_named and ndim == 2

    def _moved(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> dict[str, Tensor]:
        """Move the matrices; return all other parameters."""
        matrices, others = self.split(params)
        here = {name: param for name, param in matrices.items() if name in grads and param.numel()}
        self.move(here, grads, state, lr_scale=lr_scale, step=step)
        return others

    def _is_matrix_of(self, name: str, slots: Mapping[str, Tensor]) -> bool:
        return bool(slots) and self.is_matrix(name, next(iter(slots.values())).ndim)

    @property
    def _key(self) -> str:
        return f"train.optimizer.{type(self).__module__.rpartition('.')[2]}.matrices"


@cache
def names_matrix(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether a name is that of a matrix, if its parameter has two dimensions."""
    if patterns:
        return any(re.search(pattern, name) for pattern in patterns)
    return not any(re.search(pattern, name) for pattern in NO_LINEAR_LAYER)
