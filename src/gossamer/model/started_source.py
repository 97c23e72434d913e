"""A model source whose weights are those of a start folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from gossamer.model.source import Files
from gossamer.model.source._digest import digest
from gossamer.model.source._weights import give
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.config import ModelSection
from gossamer.store.quantized_folder import QuantizedFolder
from gossamer.store.start_folder import StartFolder, start_state, state_shapes


@dataclass(frozen=True)
class StartedSource(WrappedSource):
    """The source of the model that `inner` describes, with the weights of the start folder `of`."""

    of: str

    def describe(self) -> str:
        return f"{self.inner.describe()}, started from {self.of}"

    def build(self, seed: int) -> nn.Module:
        module = self.inner.bare(seed)
        self.load(module, frozenset(state_shapes(module)), seed=seed)
        return module

    @property
    def has_weights(self) -> bool:
        return True

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> None:
        """Read the weights named in `names`, and the persistent buffers, which every rank holds."""
        self.folder.check_fits(state_shapes(module), self.inner.describe())
        parameters = dict(module.named_parameters())
        for name, _ in list(start_state(module)):
            if name in names or name not in parameters:
                give(module, name, self.folder.tensor(name))

    def files(self) -> Files:
        """Return the files that the model names, else those of the start folder."""
        beside = ("start.json", "config.json", "README.md")
        own = (one for one in self.folder.path.iterdir() if one.is_file() and one.name not in beside)
        mine: Files = {one.name: one for one in own if one.suffix != ".safetensors"}
        return self.inner.files() or mine

    def kept(self) -> Files:
        kept = self.inner.kept()
        return {**self.files(), **kept} if kept else kept

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), "start"], self.folder.files())

    @cached_property
    def folder(self) -> StartFolder:
        return StartFolder(Path(self.of).expanduser())


def start_of(section: ModelSection) -> StartFolder | None:
    """Return the start folder that a model begins from: `model.start`, or a folder in `model.hf` that is one.

    None also for a quantized folder in `model.start`, which has no moments or masks.
    """
    if section.start is not None:
        path = Path(section.start).expanduser()
        return None if QuantizedFolder.is_at(path) else StartFolder(path)
    if section.hf is not None and StartFolder.is_at(Path(section.hf).expanduser()):
        return StartFolder(Path(section.hf).expanduser(), key="model.hf")
    return None
