"""The masks of adapted layers: from a start folder, or from the zeros of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.adapter._peft import layers
from gossamer.spec.errors import bad_input
from gossamer.store.start_folder import MASKS, StartFolder

_KEY = "model.adapter"


def masks_of_start(module: nn.Module, start: StartFolder | None, held: frozenset[str] | None) -> None:
    """Give adapted layers their masks in `start`; a layer without one there was not pruned, and has none.

    held: the names of weights whose values are there, which must be 0 where the mask says so; None: all. Raises
    BadInput without masks, for none of an adapted layer, and for those of another model.
    """
    known = start.kinds(MASKS) if start is not None else {}
    if start is None or not known:
        got = "none: model.start names no start folder" if start is None else f"none in {start.path}"
        raise bad_input(
            wanted="a start folder with masks, as gossamer prune writes it",
            got=got,
            do="set model.start to one, or mask: nonzero for a model that was pruned elsewhere",
            key=_KEY,
        )
    found = [(name, layer) for name, layer in _weights(module) if name in known]
    if not found:
        raise bad_input(
            wanted="an adapter on layers that were pruned",
            got=f"layers without a mask in {start.path}",
            do="name others with targets, or choose lora",
            key=f"{_KEY}.targets",
        )
    for name, layer in found:
        weight = layer.get_base_layer().weight
        mask = start.tensor(name, MASKS).bool()
        if mask.shape != weight.shape:
            raise _of_another(start, f"{name} of shape {tuple(mask.shape)}, where it has {tuple(weight.shape)}")
        if (held is None or name in held) and bool(weight.detach()[~mask].count_nonzero()):
            raise _of_another(start, f"{name} with weights that the mask says are 0")
        _place(layer, mask)


def masks_of_zeros(module: nn.Module, held: frozenset[str] | None) -> None:
    """Let adapted layers keep the weights that are not 0; a layer whose values are not there yet keeps all.

    Raises BadInput for a model without zeros, in which nothing was pruned.
    """
    count = 0
    for name, layer in _weights(module):
        weight = layer.get_base_layer().weight.detach()
        if held is None or name in held:
            mask = weight != 0
            count += int((~mask).sum())
        else:
            mask = torch.ones(weight.shape, dtype=torch.bool)
        _place(layer, mask)
    if held is None and not count:
        raise bad_input(
            wanted="weights of 0 in the adapted layers, for mask: nonzero",
            got="none",
            do="prune the model first (gossamer prune), or choose lora",
            key=_KEY,
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the adapted layers by the name of their weight."""
    for path, layer in layers(module):
        yield (f"{path}.weight" if path else "weight"), layer


def _place(layer: Any, mask: Tensor) -> None:
    layer.mask = mask.to(layer.get_base_layer().weight.device)


def _of_another(start: StartFolder, got: str) -> Exception:
    return bad_input(
        wanted=f"masks of this model in {start.path}", got=got, do="prune this model, and start from that", key=_KEY
    )
