"""The sources from which a rank builds its part of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from gossamer.model.mapped_storage import into_memory, mapped
from gossamer.model.module_copy import copied
from gossamer.model.python_state.random_generators import generators_kept
from gossamer.model.snapshot import Snapshot
from gossamer.model.source import ModelSource
from gossamer.model.split.constructor_state import (
    ConstructorState,
    check_held,
    check_twice,
    digests_of,
    shared_memory,
    tensors_of,
)
from gossamer.model.split.constructor_trace import NotSimple
from gossamer.model.split.meta_init import MetaModel, hollow_out, registered, without_storage
from gossamer.run.resources import memory
from gossamer.spec.errors import RunFailed, bad_input


class ModelProvider(ABC):
    """The source from which a rank builds its part of a model: the user's constructor, or an existing module."""

    @abstractmethod
    def whole(self) -> nn.Module:
        """Return the full model."""

    @abstractmethod
    def outline(self) -> nn.Module:
        """Return the model with its forward as in training, but without memory for its parameters."""

    @abstractmethod
    def construction(self) -> ConstructorState:
        """Return the record of the model's construction: shared memory, and tensors computed from parameters."""

    @abstractmethod
    def part(self, holds: frozenset[str]) -> nn.Module:
        """Return the model with the parameters named in `holds`; the others have no memory, or may be freed.

        Raises BadInput if one of them has no values of its own, or other values than the last time.
        """

    @abstractmethod
    def digests(self) -> dict[str, int]:
        """Return a 48-bit hash of each initial parameter and buffer that this rank has seen, by name.

        The name "" stands for the operations of the constructor.
        """

    @abstractmethod
    def share(self, ranks: int) -> None:
        """Set the number of ranks that build at the same time in this machine's memory."""

    @abstractmethod
    def again(self) -> ModelProvider:
        """Return a source that builds new modules of the same model, whatever happens to the earlier ones."""


@dataclass
class OriginSource(ModelProvider):
    """A model that is not built yet, from the configured model source.

    If its constructor is simple (`MetaModel`), its parts are built without memory for the rest. Otherwise the
    constructor runs with real parameters on every rank, partly in files if the model exceeds the rank's share of
    memory. Parameters that the rank does not hold are then freed.
    """

    origin: ModelSource
    seed: int
    ranks: int = 1
    read_whole: frozenset[str] = frozenset()  # tensors of parts for which the whole model was read
    _digests: dict[str, int] = field(default_factory=dict, repr=False)
    _before: Snapshot | None = field(default=None, repr=False)  # the user's code, before its constructor first ran

    @cached_property
    def _found(self) -> tuple[nn.Module, MetaModel | None, ConstructorState]:
        try:
            skeleton = MetaModel.of(self._bare, is_loaded=self.origin.has_weights)
            return skeleton.module, skeleton, ConstructorState()
        except NotSimple as not_simple:
            with registered() as names:
                module = self._real()
            reason = f"whole on every rank: {not_simple.finding.told(names(module))}"
        construction = ConstructorState.of(module, reason)
        hollow_out(module, frozenset())
        return module, None, construction

    def whole(self) -> nn.Module:
        return self._anew(lambda: self.origin.build(self.seed))

    def outline(self) -> nn.Module:
        return self._found[0]

    def construction(self) -> ConstructorState:
        return self._found[2]

    def part(self, holds: frozenset[str]) -> nn.Module:
        skeleton = self._found[1]
        module = self._of_parts(skeleton, holds) if skeleton is not None else None
        if module is None:
            module = self._real(holds)
            hollow_out(module, holds)
        check_held(module, holds)
        return module

    def digests(self) -> dict[str, int]:
        return dict(self._digests)

    def share(self, ranks: int) -> None:
        self.ranks = ranks

    def _of_parts(self, skeleton: MetaModel, holds: frozenset[str]) -> nn.Module | None:
        """Return the model with some parameters; None if its constructor then takes another path."""
        try:
            # What is loaded brings its own memory.
            module = skeleton.build(self._bare, frozenset() if self.origin.has_weights else holds)
        except NotSimple:
            if (made := ConstructorState.of(self._real(), "")) != ConstructorState():
                raise RunFailed(
                    f"{self.origin.describe()} is built in another way every time ({made}): let its constructor run "
                    "the same operators in every call"
                ) from None
            return None
        self.read_whole |= self.origin.load(module, holds, seed=self.seed)
        check_held(module, holds)
        buffers = frozenset(name for name, _ in module.named_buffers())
        self._keep({"": skeleton.tape} | digests_of(module, holds | buffers))
        return module

    def _real(self, holds: frozenset[str] = frozenset()) -> nn.Module:
        """Return the full model, built with real parameters.

        Large tensors are in files if the model exceeds this rank's share of memory, except those named in `holds`.
        """
        with mapped(memory()[1] // (2 * self.ranks)) as places:
            module = self.whole()
        if places:
            together = frozenset[str]().union(*shared_memory(module))
            into_memory((x for n, x in tensors_of(module).items() if n in holds - together), places)
        check_held(module, frozenset(name for name, _ in module.named_parameters()))
        self._keep(digests_of(module))
        return module

    def _keep(self, found: dict[str, int]) -> None:
        check_twice(self._digests, found)
        self._digests |= found

    def _bare(self) -> nn.Module:
        return self._anew(lambda: self.origin.bare(self.seed))

    def _anew(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build from the same state of the user's code every time; side effects of the constructor remain once."""
        if self.origin.code is not None:
            with generators_kept():
                if self._before is not None:
                    self._before.put_back()
                holder = nn.Module()
                vars(holder)["code"] = self.origin.code
                self._before = Snapshot.of(holder)  # anew: iterators are put back once
        return build()

    def again(self) -> ModelProvider:
        return self


@dataclass(frozen=True, slots=True)
class ModuleSource(ModelProvider):
    """A module of the caller, built in full; parameters that this rank does not hold are freed."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return self.module

    def outline(self) -> nn.Module:
        try:
            return without_storage(self.module)
        except (TypeError, RuntimeError) as error:
            raise bad_input(
                wanted="a module that can be copied (copy.deepcopy), to trace its forward before it is split into "
                "stages",
                got=f"{type(error).__name__}: {error}",
                do="give a function that builds the module instead (model.factory)",
                key="model",
            ) from error

    def construction(self) -> ConstructorState:
        return ConstructorState.of(self.module, "")

    def part(self, holds: frozenset[str]) -> nn.Module:
        check_held(self.module, holds)
        return self.module

    def digests(self) -> dict[str, int]:
        return digests_of(self.module)

    def share(self, ranks: int) -> None:
        pass

    def again(self) -> ModelProvider:
        return CopySource(self.module)


@dataclass(frozen=True, slots=True)
class CopySource(ModelProvider):
    """A source that returns copies of a module."""

    module: nn.Module

    def whole(self) -> nn.Module:
        return copied(self.module)

    def outline(self) -> nn.Module:
        return ModuleSource(self.module).outline()

    def construction(self) -> ConstructorState:
        return ConstructorState.of(self.module, "")

    def part(self, holds: frozenset[str]) -> nn.Module:
        check_held(self.module, holds)
        return copied(self.module, holds)

    def digests(self) -> dict[str, int]:
        return digests_of(self.module)

    def share(self, ranks: int) -> None:
        pass

    def again(self) -> ModelProvider:
        return self
