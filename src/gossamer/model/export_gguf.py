"""Export of a model to a GGUF file, which llama.cpp runs: in float16, in blocks of 8 bits (Q8_0), or as it is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.data.tokenizer import Tokenizer
from gossamer.model.adapter import merge
from gossamer.model.export import files_beside, untied_state
from gossamer.model.gguf_architecture import (
    GgufArchitecture,
    architecture_of,
    gguf_name,
    heads_of,
    permuted,
    sizes_of,
)
from gossamer.model.packed_gguf import gguf_rows, gguf_type
from gossamer.model.quantize_base import linear_names
from gossamer.model.quantized import Blocks
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import BUFFERS, QuantizedLinear, quantized_layers, weight_of
from gossamer.model.side_folder import check_mergeable
from gossamer.model.source import ModelSource
from gossamer.spec.errors import bad_input
from gossamer.store.gguf_vocabulary import GgufVocabulary, read_vocabulary
from gossamer.store.gguf_write import GgufTensor, check_new, gguf_package, write_gguf

GgufType = Literal["f16", "q8_0", "held"]
Held = Tensor | QuantizedLinear  # what holds a tensor: a quantized layer is decoded when its turn comes
_FILE_TYPE = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}  # general.file_type: of most tensors
_BLOCK = 32  # elements of a Q8_0 block
_SLAB = 1 << 20  # elements that are converted at a time
_HALF, _SINGLE = torch.finfo(torch.float16).max, torch.finfo(torch.float32).max
_LARGEST = {"F32": _SINGLE, "F16": _HALF, "Q8_0": 127 * _HALF}


def export_gguf(
    module: nn.Module, origin: ModelSource | None, tokenizer: Tokenizer | None, target: Path, *, kind: GgufType = "f16"
) -> dict[str, Any]:
    """Write `module` to the new GGUF file `target`; return its bytes, its tensors, and notes.

    Matrices are written as `kind`; those whose rows are no multiple of 32 elements as float16 also where it is q8_0;
    norms and biases as float32. Where it is held, the integers of quantized layers are written bit for bit, and all
    other matrices as float16. An adapter is merged into the weights of `module`, in place. The tokenizer is that of
    `origin`, or `tokenizer` if it is another one. Tensors are converted one by one. Raises BadInput for an existing
    target, and by name for whatever has no equal in llama.cpp: architecture, setting, tensor, tokenizer, integers.
    """
    check_new(target)
    check_mergeable(module)
    merge(module)
    inner: Any = getattr(module, "_orig_mod", module)  # the module that torch.compile wrapped
    architecture = architecture_of(inner)
    sizes = sizes_of(inner, architecture)
    vocabulary = _vocabulary(inner, origin, tokenizer)
    held = _held(inner)
    tensors = [_planned(name, tensor, kind) for name, tensor in held.items()]
    if sizes.frequency_factors is not None:
        held["rope_freqs.weight"] = sizes.frequency_factors
        tensors.append(GgufTensor("rope_freqs.weight", tuple(sizes.frequency_factors.shape), "F32"))
    fields = {
        "general.type": "model",
        "general.name": _title(target),
        "general.file_type": _FILE_TYPE[_most(tensors, kind)],
        **({"general.quantization_version": 2} if kind != "f16" else {}),
        **sizes.fields,
        **vocabulary.fields(),
    }
    contents = _contents(held, tensors, architecture, inner.config, kind)
    file_bytes = write_gguf(target, architecture.name, fields, tensors, contents)
    notes = [*sizes.notes, *vocabulary.notes, *_kept_wide(tensors, kind)]
    return {"bytes": file_bytes, "tensors": len(tensors), "type": kind, "notes": notes}


def check_gguf(module: nn.Module, origin: ModelSource | None, tokenizer: Tokenizer | None) -> None:
    """Raise BadInput for what `export_gguf` would refuse of a model whose linear layers will be held as integers."""
    sizes_of(module, architecture_of(module))
    _vocabulary(module, origin, tokenizer)
    _held(module)
    for name in linear_names(module):
        columns = weight_of(module.get_submodule(name)).shape[1]
        if columns % _BLOCK:
            raise bad_input(
                wanted=f"rows of a multiple of {_BLOCK} weights, for a GGUF file of integers",
                got=f"{columns} in {name}",
                do="write a folder, and export that with --to gguf --type f16",
                key="--out",
            )


def _title(target: Path) -> str:
    """Return the model's name: transformers takes a model named "mistral" for another architecture."""
    return "Mistral" if target.stem == "mistral" else target.stem


def _vocabulary(module: Any, origin: ModelSource | None, tokenizer: Tokenizer | None) -> GgufVocabulary:
    files = {n: f if isinstance(f, bytes) else f.read_bytes() for n, f in files_beside(origin, tokenizer).items()}
    if "tokenizer.json" not in files:
        raise bad_input(
            wanted="a tokenizer.json for the GGUF file",
            got=f"a model with {', '.join(sorted(files)) or 'no tokenizer'}",
            do="export with --to hf",
        )
    config, eos = module.config, module.config.eos_token_id
    return read_vocabulary(
        files,
        size=module.get_input_embeddings().weight.shape[0],
        bos=config.bos_token_id,
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _held(module: nn.Module) -> dict[str, Held]:
    """Return the tensors of `module` by their name in the file. Raises BadInput for one that has no place there."""
    layers = quantized_layers(module)
    blocks = {f"{name}.{buffer}" for name in layers for buffer in BUFFERS}
    state: dict[str, Held] = {name: one for name, one in untied_state(module).items() if name not in blocks}
    state |= {f"{name}.weight": layer for name, layer in layers.items()}
    found: dict[str, Held] = {}
    for name, tensor in state.items():
        place = gguf_name(name)
        if place is None:
            raise bad_input(
                wanted=f"tensors that llama.cpp knows in a {type(module).__name__}",
                got=f"{name} of shape {_shape(tensor)}",
                do="export with --to hf",
            )
        found[place] = tensor
    return found


def _shape(tensor: Held) -> tuple[int, ...]:
    if isinstance(tensor, QuantizedLinear):
        return tensor.out_features, tensor.in_features
    return tuple(tensor.shape)


def _planned(name: str, tensor: Held, kind: GgufType) -> GgufTensor:
    shape = _shape(tensor)
    if len(shape) < 2:
        return GgufTensor(name, shape, "F32")
    if kind == "held":
        if not isinstance(tensor, QuantizedLinear):
            return GgufTensor(name, shape, "F16")
        return GgufTensor(name, shape, gguf_type(packed_of(tensor)))
    return GgufTensor(name, shape, "Q8_0" if kind == "q8_0" and shape[-1] % _BLOCK == 0 else "F16")


def _most(tensors: list[GgufTensor], kind: GgufType) -> str:
    """Return the type that general.file_type names: that of the quantized matrices."""
    if kind != "held":
        return kind.upper()
    return next((one.kind for one in tensors if one.kind not in ("F16", "F32")), "F16")


def _kept_wide(tensors: list[GgufTensor], kind: GgufType) -> list[str]:
    wide = [tensor.name for tensor in tensors if tensor.kind == "F16"] if kind == "q8_0" else []
    if not wide:
        return []
    return [f"{len(wide)} matrices stay float16, as their rows are no multiple of {_BLOCK} elements: {wide[0]}, ..."]


def _contents(
    held: dict[str, Held], tensors: list[GgufTensor], architecture: GgufArchitecture, config: Any, kind: GgufType
) -> Iterator[NDArray[Any]]:
    """Yield the tensors as the file holds them, one after the other."""
    heads = heads_of(config) if architecture.has_permuted_rows else {}
    for planned in tensors:
        source = held[planned.name]
        is_held = kind == "held" and isinstance(source, QuantizedLinear)
        if isinstance(source, QuantizedLinear):
            tensor = _rows(source) if is_held else source.weight.detach().cpu()
        else:
            tensor = source.detach().cpu()
        if (parts := planned.name.split("."))[0] == "blk" and parts[2] in heads:
            tensor = permuted(tensor, heads[parts[2]])
        yield tensor.contiguous().numpy() if is_held else _encoded(planned, tensor)


def packed_of(layer: QuantizedLinear) -> Packed:
    """Return the format of a layer. Raises BadInput for one that is not packed integers."""
    if not isinstance(layer.format, Packed):
        raise bad_input(
            wanted="packed integers, as gossamer quantize makes", got=str(layer.format), do="export with --type f16"
        )
    return layer.format


def _rows(layer: QuantizedLinear) -> Tensor:
    """Return the integers of a layer as rows of their GGUF type."""
    return gguf_rows(packed_of(layer), Blocks(layer.weight_blocks, layer.weight_scales), layer.in_features).cpu()


def _encoded(planned: GgufTensor, tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor as the file holds it, (rows, bytes of a row), made in slabs of rows.

    Raises BadInput for values that its type cannot hold.
    """
    rows = tensor.reshape(len(tensor) if tensor.ndim > 1 else 1, -1)
    out = np.empty((len(rows), planned.nbytes // len(rows)), np.uint8)
    step = max(1, _SLAB // rows.shape[1])
    for start in range(0, len(rows), step):
        slab = rows[start : start + step]
        largest = float(slab.abs().max())
        if not largest <= _LARGEST[planned.kind]:  # nor where it is not a number
            raise bad_input(
                wanted=f"finite values that {planned.kind} can hold in {planned.name}",
                got=f"values up to {largest:.3g}",
                do="export with --to hf",
            )
        out[start : start + step] = _slab(planned.kind, slab)
    return out


def _slab(kind: str, slab: Tensor) -> NDArray[np.uint8]:
    if kind == "Q8_0":
        package = gguf_package()
        made = package.quantize(slab.float().contiguous().numpy(), package.GGMLQuantizationType.Q8_0)
    else:
        made = slab.to(torch.float16 if kind == "F16" else torch.float32).contiguous().numpy()
    found: NDArray[np.uint8] = made.view(np.uint8)
    return found
