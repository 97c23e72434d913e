"""Growth: a small model made into a larger one of the same code, from which training goes on. One method per file.

A method says, for each dim of each parameter, how its elements come from those of the small model (`_dim_map`), and for
each block of the large model, from which blocks. To add one:

- Write `grow/NAME.py`: one final frozen dataclass, a subclass of `Growth`, whose fields are its settings. It is
  found by its file name (`gossamer grow --by NAME`).
- `grow(task)` returns the tensors of the target. `_grown.grow_tensors` does the loop over parameters: it finds where a
  dim of the target comes from by the structures of both models, and refuses by name what cannot be paired.
- Persistent buffers and the epsilon of norms go on as they are: `_grown.inherited`.
- Declare in a class variable what it promises (`is_lossless`).
- Tests: `tests/grow/test_NAME.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gossamer.model.structure.model import ModelStructure
from gossamer.spec.registry import Registry

KEY = "--by"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthTask:
    """What is grown into what.

    tensors: parameters and persistent buffers of the source, by name; moments: "SLOT/PARAMETER" -> optimizer state of
    the source, of the slots whose degree in the gradient is known (`degrees`: slot -> 1 or 2); before: tensors of a
    model of the target's sizes, for methods that mix with it (`Growth.before`); others: of further models, for methods
    that name some (`Growth.others`).
    """

    source: ModelStructure
    target: ModelStructure
    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)
    others: tuple[Mapping[str, Tensor], ...] = ()
    tokens: float = 0.0  # that the target will be trained for; 0: not known
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """The target's parameters and persistent buffers by name, its moments, the epsilon of its norms, and figures.

    eps: by the name of a norm's weight; is_lossless: the target is to compute what the source computes, by a method
    that promises it of some targets alone.
    """

    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    eps: Mapping[str, float] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    is_lossless: bool = False


class Growth(ABC):
    """A way to make a model from another one: a frozen dataclass of settings.

    is_lossless: the target computes what the source computes, which is proved before it is written.
    """

    is_lossless: ClassVar[bool] = False

    @abstractmethod
    def grow(self, task: GrowthTask) -> Grown:
        """Return the tensors of the target. Raises BadInput for sizes or a structure that the method cannot serve."""

    @property
    def before(self) -> str:
        """Return the place of a model of the target's sizes that the method mixes with; "" for none."""
        return ""

    @property
    def others(self) -> tuple[str, ...]:
        """Return the places of further models that the method takes."""
        return ()


REGISTRY: Registry[Growth] = Registry(__name__, Growth)
names = REGISTRY.names
build = REGISTRY.build
