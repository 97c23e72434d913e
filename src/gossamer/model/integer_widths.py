"""What a folder of integers at several widths holds of a module, and what a module takes from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gossamer.model.quantized import Blocks
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import BUFFERS, quantized_layers, weight_of
from gossamer.spec.errors import bad_input
from gossamer.store.checkpoint.checksum import checksum
from gossamer.store.integers_folder import IntegersFolder
from gossamer.store.slices import Slice

_CODES, _SCALES = BUFFERS


def integers_of(module: nn.Module, bits: int) -> dict[str, Tensor]:
    """Return the integers and scales of a module whose layers were quantized to `bits`, as the folder names them."""
    found: dict[str, Tensor] = {}
    for name, layer in quantized_layers(module).items():
        assert layer.weight_scales is not None
        found[f"{name}.{bits}.{_CODES}"], found[f"{name}.{bits}.{_SCALES}"] = layer.weight_blocks, layer.weight_scales
    return found


def weight_checksums(module: nn.Module) -> dict[str, int]:
    """Return the checksum of every parameter, tied ones once, in float32: a type that holds its values keeps it."""
    return {name: _checksum(name, one) for name, one in module.named_parameters()}


def check_source(folder: IntegersFolder, module: nn.Module) -> None:
    """Raise BadInput where the folder was not made of the weights that `module` has."""
    wanted, found = folder.weights, dict(module.named_parameters())
    if other := sorted(wanted.keys() ^ found.keys()):
        got = f"{other[0]}, which {'this model' if other[0] in wanted else 'that model'} does not have"
    else:
        got = next((f"other values in {name}" for name in found if _checksum(name, found[name]) != wanted[name]), "")
    if got:
        raise bad_input(
            wanted=f"the model of whose weights {folder.path} was made",
            got=got,
            do="quantize this model with gossamer quantize --bits 2,3,4, or name that one, with the model.dtype of its "
            "weights",
            key=folder.key,
        )


def layer_integers(
    folder: IntegersFolder, name: str, linear: nn.Module, widths: Sequence[int], group: int
) -> dict[int, Blocks]:
    """Return the integers of a layer by width. Raises BadInput for what the folder does not hold."""
    if group != folder.group:
        raise bad_input(
            wanted=f"groups of {group} (model.adapter.qfa.group)",
            got=f"groups of {folder.group} in {folder.path}",
            do=f"write group: {folder.group}, or quantize with --group {group}",
            key=folder.key,
        )
    if missing := [one for one in widths if one not in folder.widths]:
        written = ",".join(str(one) for one in widths)
        raise bad_input(
            wanted=f"integers of {missing[0]} bits (model.adapter.qfa.widths)",
            got=f"those of {', '.join(map(str, folder.widths))} bits in {folder.path}",
            do=f"write widths: {[*folder.widths]}, or quantize with --bits {written}",
            key=folder.key,
        )
    if name not in folder.layers:
        raise bad_input(
            wanted=f"integers of {name}, which the adapter is put on",
            got=f"those of {len(folder.layers)} other layers in {folder.path}",
            do="leave that layer out: model.adapter.qfa.targets",
            key=folder.key,
        )
    weight = weight_of(linear)
    return {bits: _blocks(folder, f"{name}.{bits}", Packed(bits=bits, group=group), weight) for bits in widths}


def _blocks(folder: IntegersFolder, name: str, format: Packed, weight: Tensor) -> Blocks:
    codes, scales = folder.tensor(f"{name}.{_CODES}"), folder.tensor(f"{name}.{_SCALES}")
    rows, columns = weight.shape
    like = format.empty(rows, columns, torch.device("meta"))
    assert like.scales is not None
    for wanted, found in ((like.codes, codes), (like.scales, scales)):
        if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
            raise folder.damaged(f"{name} in {found.dtype} of shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    return Blocks(codes.to(weight.device), scales.to(weight.device))


def _checksum(name: str, weight: Tensor) -> int:
    return checksum(Slice.whole(name, tuple(weight.shape)), weight.detach().float().cpu().contiguous())
