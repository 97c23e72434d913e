"""Adapters: a few trained numbers beside the frozen weights of a model's linear layers, one kind per file.

The layers are peft's. An adapter is parameters like any others: exchanges, stages, sharded states, islands and
checkpoints treat it as they treat a weight. A base weight keeps the name that it has without an adapter
(`q_proj.weight`), and an adapter's tensors have their slot's name (`q_proj.lora_A.weight`), although peft holds them at
`q_proj.base_layer.weight` and `q_proj.lora_A.default.weight`. Both names are registered for one tensor, as tied weights
are, and the short one comes first.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer.model.adapter import _peft
from gossamer.model.adapter._peft import folder_files as adapter_folder
from gossamer.model.adapter._targets import targets_of
from gossamer.model.qfa_linear import QfaLinear, merge_widths
from gossamer.model.seeded import seeded
from gossamer.model.unit_seeds import mix
from gossamer.spec.registry import Registry
from gossamer.store.start_folder import StartFolder

__all__ = [
    "Adapter",
    "AdapterTensor",
    "KEY",
    "REGISTRY",
    "adapt",
    "adapter_folder",
    "adapter_tensors",
    "build",
    "merge",
    "names",
    "redraw",
]

KEY = "model.adapter"


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor of an adapter.

    `layer`: the peft layer that holds it; `slot`: its attribute there, such as lora_A; `name`: its canonical name.
    """

    layer: Any
    slot: str
    name: str
    tensor: Tensor


class Adapter(ABC):
    """An adapter: a frozen dataclass of settings.

    `targets`: patterns (regular expressions) of the linear layers to adapt, each found somewhere in a layer's path;
    empty: every linear layer in the repeated blocks. `takes_blocks`: it can adapt a layer whose weight is held in
    quantized blocks. `keeps_masks`: the merged weights keep the zeros that the masks of a start folder say.
    `replaces_layers`: it puts layers of its own in the place of the linear ones, by `replace`.
    `is_scale`: its matrices multiply weights, so that they must not decay. `without_start`: settings with which it
    needs nothing of a start folder, and has the same shapes.
    """

    targets: tuple[str, ...]
    takes_blocks: ClassVar[bool] = False
    keeps_masks: ClassVar[bool] = False
    replaces_layers: ClassVar[bool] = False
    is_scale: ClassVar[bool] = False
    without_start: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def config(self, paths: Sequence[str]) -> Any:
        """Return peft's configuration of this adapter on the linear layers at `paths`."""

    @abstractmethod
    def draw(self, of: AdapterTensor) -> None:
        """Set a tensor to its initial values, in place; random ones come from torch's default generator."""

    def replace(self, module: nn.Module, paths: Sequence[str]) -> None:
        """Put layers of its own in the place of the linear layers at `paths`; of an adapter that `replaces_layers`."""
        raise AssertionError("its layers are peft's")

    def files(self) -> Sequence[Path]:
        """Return the files of which it takes frozen values: with others, the base is another one. Raises BadInput."""
        return ()

    def is_trained(self, slot: str) -> bool:
        """Return whether training changes the tensors of a slot."""
        return True

    def place_masks(  # noqa: B027  (most adapters keep none)
        self, module: nn.Module, start: StartFolder | None, held: frozenset[str] | None
    ) -> None:
        """Give the adapted layers the masks that they keep. `start`: the start folder of the model, if it has one;
        `held`: the names of the weights whose values are there, None: all. Raises BadInput for masks that do not fit.
        """

    def merging_changes(self) -> str:
        """Return what merging into the weights would lose, in words; "" if the merged model computes the same."""
        return ""


REGISTRY: Registry[Adapter] = Registry(__name__, Adapter)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def adapt(module: nn.Module, adapter: Adapter, seed: int) -> None:
    """Put `adapter` on the linear layers of `module`, in place, and freeze everything else.

    The layers compute what they computed before. Initial values are a function of `seed` and of each tensor's name.
    Raises BadInput for a pattern that finds no linear layer.
    """
    paths = targets_of(module, adapter.targets, key=f"{KEY}.targets")
    if adapter.replaces_layers:
        adapter.replace(module, paths)
        module.requires_grad_(False)
    else:
        _peft.inject(module, adapter.config(paths))
        _peft.give_short_names(module)
    for one in adapter_tensors(module):
        one.tensor.requires_grad_(adapter.is_trained(one.slot))
    redraw(module, adapter, frozenset(one.name for one in adapter_tensors(module)), seed)


@torch.no_grad()
def redraw(module: nn.Module, adapter: Adapter, names: frozenset[str], seed: int) -> None:
    """Set the adapter's tensors that are named in `names` to their initial values."""
    for one in adapter_tensors(module):
        if one.name in names:
            with seeded(mix(seed, zlib.crc32(one.name.encode()))):
                adapter.draw(one)


def merge(module: nn.Module) -> None:
    """Merge the adapter into the weights and put the layers back, in place; a model without an adapter stays as it is.

    Of a layer of several widths the one that is set counts. Raises BadInput as the adapter's library does.
    """
    merge_widths(module)
    _peft.merge(module)


def adapter_tensors(module: nn.Module) -> Iterator[AdapterTensor]:
    """Yield the tensors of the adapter in `module`, trained or not; none if it has no adapter."""
    for path, layer in module.named_modules():
        for slot, tensor in layer.slots() if isinstance(layer, QfaLinear) else _peft.slots(layer):
            yield AdapterTensor(layer, slot, f"{path}.{slot}.weight" if path else f"{slot}.weight", tensor)
