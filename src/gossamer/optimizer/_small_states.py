"""AdamW whose moments are kept in 8 bits: decoded, updated by AdamW itself and encoded again, some rows at a time.

A code has the parameter's rows, and its blocks lie within a row: so rows of a parameter have rows of its states, on
any number of ranks, bit for bit. What is coded is decided from the whole parameter, wherever its rows are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gossamer.optimizer import OptimizerState
from gossamer.optimizer._adam import Adaptive
from gossamer.optimizer._foreach import zeros
from gossamer.optimizer.adamw import AdamW

LEAST_NUMEL = 4096  # parameters with fewer elements keep float32: they are a small part of all, and matter most
LEAST_ROW = 32  # and those with shorter rows, whose scales would need as much as the codes save
_CHUNK = 1 << 17  # elements that are decoded at a time
_PLAIN = ("mean", "square")


class SmallStates(Adaptive):
    """AdamW with both moments in a code of 8 bits per element, where a parameter is large enough."""

    __slots__ = ()

    @property
    @abstractmethod
    def decay_1d(self) -> bool:
        """Return whether vectors and scalars decay too."""

    @property
    @abstractmethod
    def code(self) -> str:
        """Return the name of the code, in the names of slots: states in another code are other slots."""

    @property
    @abstractmethod
    def block(self) -> int:
        """Return how many neighbors in a row share their scales."""

    @property
    @abstractmethod
    def scales(self) -> tuple[str, ...]:
        """Return the names of the float32 numbers per block."""

    @abstractmethod
    def encode(self, x: Tensor, *, signed: bool) -> tuple[Tensor, ...]:
        """Return of blocks x (..., width) float32 the codes, (..., width) uint8, and the scales, (...,) each."""

    @abstractmethod
    def decode(self, held: Sequence[Tensor], *, signed: bool) -> Tensor:
        """Return the numbers of what `encode` returned, (..., width) float32."""

    @property
    def slots(self) -> tuple[str, ...]:
        return (*_PLAIN, *self._slots("mean"), *self._slots("square"))

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        return self.init_rows(params, {name: tuple(param.shape) for name, param in params.items()})

    def init_rows(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        starts: Mapping[str, int] | None = None,
    ) -> OptimizerState:
        return {
            name: self._zeros(own) if is_large(shapes[name]) else zeros({name: own}, _PLAIN)[name]
            for name, own in rows.items()
        }

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
        rule = AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, decay_1d=self.decay_1d)
        small = {name: grad for name, grad in grads.items() if _PLAIN[0] in state[name]}
        rule.update(params, small, state, lr_scale=lr_scale, step=step)
        for name in grads.keys() - small.keys():
            for own, grad, slots in _chunks(params[name].detach(), grads[name], state[name]):
                wide = own.to(torch.promote_types(own.dtype, torch.float32))
                moments = {slot: self._decoded(slots, slot, wide) for slot in _PLAIN}
                rule.update({name: wide}, {name: grad}, {name: moments}, lr_scale=lr_scale, step=step)
                for slot, moment in moments.items():
                    self._encode(moment, slots, slot)
                if wide is not own:
                    own.copy_(wide)

    def _slots(self, moment: str) -> tuple[str, ...]:
        return tuple(f"{moment}_{part}" for part in (self.code, *self.scales))

    def _zeros(self, own: Tensor) -> dict[str, Tensor]:
        blocks = -(-prod(own.shape[1:]) // self.block)
        found = {}
        for moment in _PLAIN:
            codes, *scales = self._slots(moment)
            found[codes] = torch.zeros(own.shape, dtype=torch.uint8, device=own.device)
            for slot in scales:
                found[slot] = torch.zeros(own.shape[0], blocks, device=own.device)
            if own.device.type != "meta":
                self._encode(torch.zeros_like(own[:1], dtype=torch.float32), found, moment)
        return found

    def _decoded(self, slots: Mapping[str, Tensor], moment: str, like: Tensor) -> Tensor:
        """Return a moment as new numbers in the shape and type of `like`."""
        codes, *scales = (slots[slot] for slot in self._slots(moment))
        rows, blocks = scales[0].shape
        columns = prod(like.shape[1:])
        wide = self._in_blocks(codes.view(rows, columns), blocks)
        numbers = self.decode([wide, *scales], signed=moment == "mean")
        return numbers.view(rows, -1)[:, :columns].reshape(like.shape).to(like.dtype)

    def _encode(self, numbers: Tensor, slots: Mapping[str, Tensor], moment: str) -> None:
        """Write a moment to its slots; one row is written to all rows."""
        rows, columns = numbers.shape[0], prod(numbers.shape[1:])
        to, *scales = (slots[slot] for slot in self._slots(moment))
        blocks = self._in_blocks(numbers.reshape(rows, columns).float(), scales[0].shape[1])
        codes, *found = self.encode(blocks, signed=moment == "mean")
        to.copy_(codes.view(rows, -1)[:, :columns].reshape(numbers.shape))
        for scale, values in zip(scales, found, strict=True):
            scale.copy_(values)

    def _in_blocks(self, t: Tensor, blocks: int) -> Tensor:
        """Return t (rows, columns) as (rows, blocks, width), with zeros behind the last column."""
        width = min(self.block, t.shape[1])
        odd = blocks * width - t.shape[1]
        return (torch.nn.functional.pad(t, (0, odd)) if odd else t).view(-1, blocks, width)


def is_large(shape: Sequence[int]) -> bool:
    """Return whether the states of a parameter of this shape are coded."""
    return len(shape) >= 2 and prod(shape) >= LEAST_NUMEL and prod(shape[1:]) >= LEAST_ROW


def _chunks(
    param: Tensor, grad: Tensor, slots: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Yield some rows at a time of a parameter, its gradient and its states, all as views."""
    step = max(1, _CHUNK // max(1, prod(param.shape[1:])))
    for start in range(0, param.shape[0], step):
        rows = slice(start, start + step)
        yield param[rows], grad[rows], {name: slot[rows] for name, slot in slots.items()}
