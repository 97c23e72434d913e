"""The blocks of a GGUF file as the frozen weights of a model's linear layers, without decoding them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.model.gguf_architecture import heads_of, unpermuted
from gossamer.model.quantize_base import linear_names, put
from gossamer.model.quantized.gguf import Gguf as BlockFormat
from gossamer.model.quantized_linear import QuantizedLinear
from gossamer.spec.errors import bad_input

_READER = "transformers.modeling_gguf_pytorch_utils"
_DENSE = ("F32",)  # types that stay an nn.Linear
_SUFFIX = ".weight_blocks"


def put_layers(opened: Any, module: nn.Module) -> dict[str, str]:
    """Replace linear layers by `QuantizedLinear` layers without values; return the GGUF type of each, by name.

    Raises BadInput for an architecture whose matrices are rearranged by more than the order of their rows.
    """
    _check_rows(opened)
    held = _by_module(opened, linear_names(module))
    found = {name: tensor.tensor_type.name for name, tensor in held.items()}
    found = {name: kind for name, kind in found.items() if kind not in _DENSE}
    for name, kind in found.items():
        linear: Any = module.get_submodule(name)
        rows, columns = linear.weight.shape
        layer = QuantizedLinear(
            columns,
            rows,
            BlockFormat(kind),
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        put(module, name, layer.train(linear.training))
    return found


def read_blocks(opened: Any, module: Any, wanted: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the blocks of the layers that are named in `wanted` by their buffer, rows in the model's order."""
    layers = [name.removesuffix(_SUFFIX) for name in sorted(wanted) if name.endswith(_SUFFIX)]
    if not layers:
        return
    _check_rows(opened)
    is_permuted = _architecture(opened) == "llama"
    heads = heads_of(module.config) if is_permuted else {}
    for name, tensor in _by_module(opened, layers).items():
        blocks = torch.from_numpy(np.array(tensor.data)).view(torch.uint8)
        place = tensor.name.split(".")[-2]
        yield name + _SUFFIX, unpermuted(blocks, heads[place]) if place in heads else blocks


def _architecture(opened: Any) -> str:
    return bytes(opened.fields["general.architecture"].parts[-1]).decode()


def _check_rows(opened: Any) -> None:
    reader: Any = importlib.import_module(_READER)
    kind = _architecture(opened)
    processor = reader.TENSOR_PROCESSORS.get(kind, reader.TensorProcessor)
    if processor not in (reader.TensorProcessor, reader.LlamaTensorProcessor):
        raise bad_input(
            wanted="a GGUF file whose matrices are those of the model, up to the order of rows",
            got=f"architecture {kind}, whose matrices are rearranged on reading",
            do="hold the linear layers as int8 or int4",
        )


def _by_module(opened: Any, layers: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """Return the file's tensors by the name of the layer whose weight they are."""
    package: Any = importlib.import_module("gguf")
    kinds = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    count = opened.fields[f"{_architecture(opened)}.block_count"].contents()
    names = package.get_tensor_name_map(kinds[_architecture(opened)], count)
    places = {f"{names.get_name(layer)}.weight": layer for layer in layers}
    return {places[tensor.name]: tensor for tensor in opened.tensors if tensor.name in places}
