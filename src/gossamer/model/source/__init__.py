"""Model sources: the kinds of places a model is built from, one per file."""

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
    """A source of a model: builds it, and knows enough before that to compare it with the data.

    Frozen; two processes with equal `fingerprint` and seed build equal weights.
    """

    @classmethod
    @abstractmethod
    def read(cls, section: ModelSection) -> ModelSource:
        """Return the source that the configuration names; raise BadInput if it is wrong."""

    @abstractmethod
    def fitted_to_tokenizer(self, vocabulary: int, separator: int) -> ModelSource:
        """Return this source adapted to a tokenizer of `vocabulary` ids whose documents end with the id `separator`.

        Only what the user left open is filled in; a model with weights, or with a written vocabulary, stays itself.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return a description in one line."""

    @abstractmethod
    def vocabulary(self) -> int | None:
        """Return the number of token ids that the model takes, without building it; None if unknown."""

    @abstractmethod
    def positions(self) -> int | None:
        """Return the longest sequence that the model takes, in tokens, without building it; None: no limit is known."""

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """Build the module, on the CPU and in training mode. Random weights are a function of `seed` alone.

        The generators of torch, numpy and `random` are left as they were. Raises BadInput.
        """

    @property
    @abstractmethod
    def code(self) -> Callable[..., Any] | None:
        """Return the user's function that `build` calls, which may keep state outside of the module; None if none."""

    @abstractmethod
    def bare(self, seed: int) -> nn.Module:
        """Build the module without reading any weights: they are random, a function of `seed` alone."""

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Return whether there are weights to load: then `load` fills all tensors that it is asked for."""

    @abstractmethod
    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        """Read the weights named in `names` (first names, where tied), and no others, into a module from `bare`.

        The module's parameters need not have memory. Does nothing if there are no weights. `seed`: that of `bare`, for
        tensors that no file holds. Returns the names for which the whole model was read, as files hold them by other
        names. Raises BadInput.
        """

    @abstractmethod
    def files(self) -> Files:
        """Return the files that belong beside the weights in an export: tokenizer files and the like."""

    @abstractmethod
    def kept(self) -> Files:
        """Return the files needed to build this model again without any weights: config.json and `files`.

        Empty if a folder cannot replace the source.
        """

    def base_digest(self, seed: int) -> str:
        """Return a digest of the base model that `build` puts an adapter on; "" if it puts none on."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of all that `build` depends on, except the seed; large files enter by size and samples."""


REGISTRY = Registry(__name__, ModelSource)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def named_by(section: ModelSection) -> ModelSource:
    """Return the model source that `hf`, `gguf` or `factory` names; raise BadInput, also if none does."""
    given = [name for name in REGISTRY.names() if getattr(section, name) is not None]
    if len(given) != 1:
        raise bad_input(
            wanted="a model: one of model.hf, model.gguf, model.factory",
            got=" and ".join(given) or "none",
            do="for a start write model: {hf: llama, config: {hidden_size: 256, num_hidden_layers: 4}}",
            key="model",
        )
    return REGISTRY.type(given[0], key="model").read(section)
