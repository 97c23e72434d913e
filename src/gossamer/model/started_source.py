"""A model source whose weights are those of a start folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from gossamer.model.adapter import adapter_tensors
from gossamer.model.source import Files
from gossamer.model.source._weights import give
from gossamer.model.wrapped_source import WrappedSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import bad_input
from gossamer.store.file_digest import digest
from gossamer.store.quantized_folder import QuantizedFolder
from gossamer.store.start_folder import KEY, StartFolder, state_shapes


@dataclass(frozen=True)
class StartedSource(WrappedSource):
    """The source of the model that `inner` describes, with the weights of the start folder `of`."""

    of: str

    def describe(self) -> str:
        return f"{self.inner.describe().replace(', random weights', '')}, weights of {self.of}"

    def bare(self, seed: int) -> nn.Module:
        module = self.inner.bare(seed)
        set_attributes(module, self.folder.attributes, self.folder.config_keys, key=self.folder.key)
        return module

    def build(self, seed: int) -> nn.Module:
        module = self.bare(seed)
        self.load(module, frozenset(state_shapes(module)), seed=seed)
        return module

    @property
    def has_weights(self) -> bool:
        return True

    def load(self, module: nn.Module, names: frozenset[str], *, seed: int) -> frozenset[str]:
        """Read the weights named in `names`, and the persistent buffers, which every rank holds."""
        added = {one.name for one in adapter_tensors(module)}  # which the folder does not have
        shapes = {name: shape for name, shape in state_shapes(module).items() if name not in added}
        self.folder.check_fits(shapes, self.inner.describe())
        parameters = dict(module.named_parameters())
        for name in shapes:
            if name in names or name not in parameters:
                give(module, name, self.folder.tensor(name))
        return frozenset()

    def files(self) -> Files:
        """Return the files that the model names, else those of the start folder."""
        beside = ("start.json", "config.json", "README.md")
        own = (one for one in self.folder.path.iterdir() if one.is_file() and one.name not in beside)
        mine: Files = {one.name: one for one in own if one.suffix != ".safetensors"}
        return self.inner.files() or mine

    def kept(self) -> Files:
        kept = self.inner.kept()
        config = kept.get("config.json")
        if config is None:
            return kept
        keys = json.loads(config if isinstance(config, bytes) else config.read_bytes())
        written = json.dumps({**keys, **self.folder.config_keys}, indent=2) + "\n"
        return {**self.files(), **kept, "config.json": written.encode()}

    def fingerprint(self) -> str:
        return digest([self.inner.fingerprint(), "start"], self.folder.files())

    @cached_property
    def folder(self) -> StartFolder:
        return StartFolder(Path(self.of).expanduser().absolute())


def set_attributes(
    module: nn.Module, attributes: Mapping[str, float], config_keys: Mapping[str, float], *, key: str = KEY
) -> None:
    """Set attributes of a module's parts, by path, and keys of its config; raise BadInput for one that it lacks."""
    for path, value in attributes.items():
        at, _, name = path.rpartition(".")
        parts = dict(module.named_modules())
        if at not in parts or not isinstance(vars(parts[at]).get(name), float):
            do = "give the model that the start folder was written for"
            raise bad_input(wanted=f"a model with the number {path}, to set it", got="none", do=do, key=key)
        setattr(parts[at], name, value)
    if config_keys:
        module.config = copy.deepcopy(module.config)  # that of the source is for every model that it builds
    for name, value in config_keys.items():
        setattr(module.config, name, value)


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
