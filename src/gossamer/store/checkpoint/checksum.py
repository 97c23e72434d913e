"""Checksums bound to identity: equal bytes under another name, position or replica have another checksum.

Slices carry CRC-32 over (name, dtype, shape, start, size, replica) followed by the data. Measured on one core of an AMD
EPYC with zlib 1.2.13, 256 MiB: crc32 6.8 GB/s, sha256 2.0, blake2b 1.4 (copying memory: 17). A checkpoint is written
beside training, on cores that training uses. The fast checksum finds every single flipped bit and every burst up to 32
bits for certain, and misses other damage once in 4e9. It guards against accidents, not against tampering.
Headers and manifests are small: they carry blake2b.
"""

from __future__ import annotations

import hashlib
import json
import zlib

import torch
from torch import Tensor

from gossamer.store.slices import Slice

# torch's name -> the safetensors format's
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype: torch.float32 or "torch.float32" -> "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype called `name`: "float32" -> torch.float32; raises KeyError for one that safetensors lacks."""
    if name not in CODES:
        raise KeyError(name)
    found: torch.dtype = getattr(torch, name)
    return found


def identity(where: Slice, dtype: str) -> int:
    """Return the CRC-32 of a slice's name, dtype, shape, start, size and replica; its data are folded in after it."""
    what = [where.name, dtype, where.shape, where.start, where.size, where.replica]
    return zlib.crc32(json.dumps(what).encode())


def checksum(where: Slice, tensor: Tensor) -> int:
    """Return the CRC-32 over identity and data of a contiguous CPU tensor."""
    return zlib.crc32(raw_bytes(tensor), identity(where, dtype_name(tensor.dtype)))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, not copied."""
    flat: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return flat


def digest(data: bytes) -> str:
    """Return the blake2b digest of `data`, 128 bits, in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
