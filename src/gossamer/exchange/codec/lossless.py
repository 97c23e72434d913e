"""Lossless: every bit of float32 in fewer bytes where they repeat themselves: exponents always, zeros where there are.

A number is cut into planes: exponents (8 bits), sign and 7 bits of mantissa, the other 16 bits. A plane of zeros is
left out (numbers that came from bfloat16 have one), one whose sample shrinks is deflated (Huffman codes alone, or with
runs), any other is sent as it is.
Wire:    12 bytes of lengths and the planes, padded to 4: at most 12 + 4 numel. Several rows are as long as the longest.
         Gaussian float32 0.83 of it, the same rounded to bfloat16 0.33, nine rows of ten zero 0.1.
Work:    some 10 ns a number to encode and 5 to decode, all but a few on the exponents; never on a GPU.
Good when: nothing may be lost and the link is slower than about 0.5 Gbit/s (float32 that is dense), or the numbers come
from bfloat16.   Not for: fast links; many short rows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.comm.random_key import Key
from gossamer.exchange.codec import Codec, CodecTraits
from gossamer.ops.blocks import as_rows, empty_message
from gossamer.ops.byte_planes import join, split

_HEAD, _SAMPLE, _PIECES = 12, 1 << 14, 16
_WORTH = 0.95  # of its size; a plane that shrinks by less is not worth the time


@dataclass(frozen=True, slots=True)
class Lossless(Codec):
    """A lossless codec for float32 numbers. It has no parameters."""

    @property
    def traits(self) -> CodecTraits:
        return CodecTraits(lossless=True, contraction=1.0, fixed_size=False)

    def nbytes(self, numel: int) -> int:
        return _HEAD + 4 * numel

    def encode(self, x: Tensor, key: Key) -> Tensor:
        messages = [_encoded(row) for row in as_rows(x)]
        longest = max((len(m) for m in messages), default=_HEAD)
        out = empty_message(x, -(-longest // 4) * 4)
        for row, found in zip(as_rows(out), messages, strict=True):
            row[: len(found)] = torch.frombuffer(found, dtype=torch.uint8).to(x.device)
        return out

    def decode(self, message: Tensor, numel: int, key: Key) -> Tensor:
        out = torch.empty((*message.shape[:-1], numel), dtype=torch.float32, device=message.device)
        for row, found in zip(as_rows(out), as_rows(message), strict=True):
            row.copy_(_decoded(found.cpu(), numel))
        return out


def _encoded(row: Tensor) -> bytearray:
    streams = [_shrunk(plane) for plane in split(row.cpu().contiguous())]
    out = bytearray(torch.tensor([len(s) for s in streams], dtype=torch.int32).numpy().tobytes())
    for stream in streams:
        out += stream
    return out


def _decoded(message: Tensor, numel: int) -> Tensor:
    sizes, start, planes = message[:_HEAD].clone().view(torch.int32).tolist(), _HEAD, []
    for size, whole in zip(sizes, (numel, numel, 2 * numel), strict=True):
        planes.append(_grown(message[start : start + size], whole))
        start += size
    return join(planes[0], planes[1], planes[2])


def _shrunk(plane: Tensor) -> memoryview | bytes:
    """Return the bytes to send of plane (n,) uint8: none for zeros, a shorter stream, or all of it."""
    if not bool(plane.any()):
        return b""
    piece = _SAMPLE // _PIECES
    ends = range(0, max(1, plane.numel() - piece), max(1, plane.numel() // _PIECES))
    sample = torch.cat([plane[i : i + piece] for i in ends])
    plain, runs = (len(_deflated(sample, way)) for way in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE))
    raw = plane.numpy().data
    if min(plain, runs) > _WORTH * sample.numel():
        return raw
    stream = _deflated(plane, zlib.Z_RLE if runs < 0.9 * plain else zlib.Z_HUFFMAN_ONLY)
    return stream if len(stream) < plane.numel() else raw


def _grown(stream: Tensor, size: int) -> Tensor:
    if stream.numel() == size:
        return stream
    if not stream.numel():
        return torch.zeros(size, dtype=torch.uint8)
    grown = bytearray(zlib.decompress(stream.numpy().data, -15, size))
    return torch.frombuffer(grown, dtype=torch.uint8)


def _deflated(plane: Tensor, way: int) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, way)
    return coder.compress(plane.numpy().data) + coder.flush()
