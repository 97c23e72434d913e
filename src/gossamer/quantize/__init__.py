"""Quantizers: how the weights of trained linear layers become integers of 2 to 8 bits. One method per file.

To add one, write `quantize/NAME.py`: one final frozen dataclass, a subclass of `Quantizer`, whose fields are its
settings; it is found by its file name. `gossamer.quantize.model.layers` finds the layers of a model, gathers the second
moments of their inputs where the method wants them, and puts quantized layers in their place. The integers and scales
are those of `gossamer.model.quantized.packed`, so a model that is quantized by any of them is written, read, trained
under an adapter and exported in one way. Tests: `tests/quantize/test_NAME.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gossamer.model.quantized import Blocks
from gossamer.model.quantized.packed import Packed
from gossamer.spec.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedWeight:
    """A weight in integers and scales. `said`: what is worth telling about it; "" for nothing."""

    blocks: Blocks
    said: str = ""


class Quantizer(ABC):
    """A way to choose the integers and scales of a weight: a frozen dataclass of settings.

    `bits`: of an integer; `group`: neighbors in a row that share a scale (0: a row); `symmetric`: whether the grid of
    values is symmetric about zero, else it goes from a group's smallest to its largest weight. `needs_inputs`: it
    chooses them from the second moments of the layer's inputs.
    """

    bits: int
    group: int
    symmetric: bool
    needs_inputs: ClassVar[bool] = False

    @property
    def format(self) -> Packed:
        """The format of the integers. Raises BadInput for bits or groups that it lacks."""
        return Packed(bits=self.bits, group=self.group, symmetric=self.symmetric)

    @abstractmethod
    def encode(self, weight: Tensor, moments: Tensor | None) -> EncodedWeight:
        """Return a weight (out, in) of finite numbers in integers.

        moments: sum of x x^T over calibration inputs x of the layer, (in, in) in float64, or any multiple of it; None
        where there are none. Raises BadInput where it cannot.
        """


REGISTRY = Registry(__name__, Quantizer)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build
