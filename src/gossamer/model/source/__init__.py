"""Where a model comes from: one kind of place per file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry

Files: TypeAlias = dict[str, bytes | Path]  # name in a directory -> its content, or the file that holds it


class ModelSource(ABC):
    """A model that can be built, known well enough before that to compare it with the data.

    Frozen; two processes with equal `fingerprint` and seed build equal weights.
    """

    @classmethod
    @abstractmethod
    def read(cls, section: ModelSection) -> ModelSource:
        """The origin that the configuration writes; raises BadInput."""

    @abstractmethod
    def suited_to(self, vocabulary: int, separator: int) -> ModelSource:
        """This model for a tokenizer of `vocabulary` ids whose documents end with the id `separator`.

        Only what the user left open is filled in; a model with weights, or with a written vocabulary, stays itself.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    @abstractmethod
    def vocabulary(self) -> int | None:
        """Number of token ids the model takes, without building it; None where that cannot be known."""

    @abstractmethod
    def positions(self) -> int | None:
        """Longest sequence in tokens the model takes, without building it; None: no limit is known."""

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """The module on the CPU in training mode. Random weights are a function of `seed` alone.

        The generators of torch, numpy and `random` are left as they were. Raises BadInput.
        """

    @property
    @abstractmethod
    def code(self) -> Callable[..., Any] | None:
        """The user's function that `build` calls, which may keep state outside of the module; None: there is none."""

    @abstractmethod
    def bare(self, seed: int) -> nn.Module:
        """`build` without reading any weights: random ones, a function of `seed` alone, in place of those to load."""

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Whether there is anything to load: then `load` fills all that it is asked for."""

    @abstractmethod
    def load(self, module: nn.Module, names: frozenset[str]) -> None:
        """Read those of the weights that are named in `names` (first names, where tied), and no others, into a module
        from `bare`, even where it has no memory for them. Nothing to do where there are none. Raises BadInput.
        """

    @abstractmethod
    def files(self) -> Files:
        """What belongs beside the weights in an export: tokenizer files and the like."""

    @abstractmethod
    def kept(self) -> Files:
        """What of the files this model came from it takes to build it once more, without any weights: config.json and
        `files`. Empty where a folder cannot stand for it.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of everything that `build` depends on, but the seed; large files enter by size and samples."""


REGISTRY = Registry(__name__, ModelSource)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def origin_of(section: ModelSection) -> ModelSource:
    """The origin a configuration writes; raises BadInput, also where none is written."""
    given = [name for name in REGISTRY.names() if getattr(section, name) is not None]
    if len(given) != 1:
        raise bad_input(
            wanted="a model: one of model.hf, model.gguf, model.factory",
            got=" and ".join(given) or "none",
            do="for a start write model: {hf: llama, config: {hidden_size: 256, num_hidden_layers: 4}}",
            key="model",
        )
    return REGISTRY.type(given[0], key="model").read(section)
