"""Packed weights as blocks of a GGUF type, bit for bit, where one fits: groups of 32 at 4, 5 or 8 bits.

    Q8_0: 8 bits, symmetric   Q4_0, Q5_0: 4, 5 bits, symmetric   Q4_1, Q5_1: 4, 5 bits, asymmetric

A block holds 32 weights of a row: the scale in float16 (then the minimum, where asymmetric), the fifth bits of 5-bit
codes in 4 bytes, then the codes; of 4 lower bits, the first 16 weights are the low halves of the bytes.
Layout: ggml-common.h of llama.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.model.quantized import Blocks
from gossamer.model.quantized.packed import Packed
from gossamer.spec.errors import bad_input

GROUP = 32
_TYPES = {(8, True): "Q8_0", (4, True): "Q4_0", (4, False): "Q4_1", (5, True): "Q5_0", (5, False): "Q5_1"}
_FIT = "groups of 32 with 4 or 5 bits, or with 8 bits and symmetric"


def gguf_type(format: Packed) -> str:
    """Return the GGUF type that holds these weights exactly. Raises BadInput where none does, with what would fit."""
    kind = _TYPES.get((format.bits, format.symmetric))
    if kind is None or format.group != GROUP:
        shown = "symmetric" if format.symmetric else "asymmetric"
        raise bad_input(
            wanted=f"integers that a GGUF type holds exactly: {_FIT}",
            got=f"{shown} ones of {format.bits} bits in groups of {format.group or 'a row'}",
            do="quantize with --bits 4 --group 32 (add --symmetric for Q4_0), or with --bits 8 --group 32 --symmetric",
        )
    return kind


def gguf_rows(format: Packed, blocks: Blocks, columns: int) -> Tensor:
    """Return the weights as rows (rows, bytes) of `gguf_type`. Raises BadInput for rows of no multiple of 32."""
    gguf_type(format)
    if columns % GROUP:
        raise bad_input(wanted=f"rows of a multiple of {GROUP} elements", got=str(columns), do="export with --type f16")
    assert blocks.scales is not None
    codes = format.codes(blocks).reshape(len(blocks.codes), -1, GROUP)
    scales = blocks.scales.contiguous().view(torch.uint8)  # (rows, groups, 2 or 4)
    if format.bits == 8:
        signed = codes ^ 128  # from q + 128 to the two's complement of q
        return torch.cat((scales, signed), -1).flatten(1)
    halves = codes & 15
    parts = [scales, halves[..., :16] | (halves[..., 16:] << 4)]
    if format.bits == 5:
        places = torch.arange(8, dtype=torch.uint8, device=codes.device)
        fifth = ((codes >> 4).reshape(*codes.shape[:2], 4, 8) << places).sum(-1).to(torch.uint8)
        parts.insert(1, fifth)
    return torch.cat(parts, -1).flatten(1)
