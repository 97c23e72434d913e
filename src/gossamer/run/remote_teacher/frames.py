"""Frames between a teacher and a student: a fixed header, a message in JSON, and the bytes of its tensors.

    header    "GSTR", version (1 byte), length of the message (4 bytes) and of the tensors (8 bytes), big-endian
    message   what is said, and name, type and shape of every tensor
    tensors   one after the other, row-major

Integers of 64 bits travel in 32 where their values fit. Nothing is unpickled; lengths are checked before memory is
filled, types and shapes against a schema, and the sum of the tensors against the header.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field, TypeAdapter, model_validator
from torch import Tensor

from gossamer.process.json_lines import Said, read_line
from gossamer.run.remote_teacher.messages import Message, Name, Refusal
from gossamer.spec.errors import BadInput, RunFailed, WireMismatch

_MAGIC, _VERSION = b"GSTR", 1
_HEADER = struct.Struct("!4sBIQ")
_MOST_SAID = 1 << 20
_MOST_TENSORS = 1 << 10
_PIECE = 1 << 20
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # else a host that is gone is seen in 2 hours
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
DType = Literal[
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
]  # of tensors that may travel
_NARROW = torch.iinfo(torch.int32)
T = TypeVar("T", bound=Said)


class Part(Said):
    """A tensor of a frame. `sent`: the type in which it travels."""

    name: Name
    dtype: DType
    sent: DType
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...], Field(max_length=8)]

    @model_validator(mode="after")
    def _is_sent_so(self) -> Part:
        if self.sent != self.dtype and (self.dtype, self.sent) != ("int64", "int32"):
            raise ValueError(f"{self.dtype} does not travel as {self.sent}")
        return self

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor as it travels."""
        return math.prod(self.shape) * _DTYPES[self.sent].itemsize


class _Envelope(Said):
    said: Message
    parts: Annotated[tuple[Part, ...], Field(max_length=_MOST_TENSORS)] = ()


_ENVELOPE: TypeAdapter[_Envelope] = TypeAdapter(_Envelope)


@dataclass(frozen=True, slots=True)
class Frame:
    """A message and its tensors, on the CPU."""

    said: Message
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def packed(said: Message, tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Return the bytes of a frame. Raises BadInput for a tensor of a type that does not travel."""
    parts, bodies = list[Part](), list[bytes]()
    for name, one in (tensors or {}).items():
        dtype = str(one.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise BadInput(
                f"a tensor of {dtype} ({name}) cannot be sent to a teacher: wanted one of {', '.join(_DTYPES)}"
            )
        plain = one.detach().cpu()
        sent = plain.to(torch.int32) if plain.dtype is torch.int64 and _is_narrow(plain) else plain
        parts.append(
            Part.model_validate(
                {
                    "name": name,
                    "dtype": dtype,
                    "sent": str(sent.dtype).removeprefix("torch."),
                    "shape": tuple(one.shape),
                }
            )
        )
        bodies.append(sent.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    text = _Envelope(said=said, parts=tuple(parts)).model_dump_json().encode()
    return b"".join([_HEADER.pack(_MAGIC, _VERSION, len(text), sum(map(len, bodies))), text, *bodies])


def _is_narrow(tensor: Tensor) -> bool:
    return not tensor.numel() or (int(tensor.min()) >= _NARROW.min and int(tensor.max()) <= _NARROW.max)


class FrameReader:
    """A splitter of a byte stream into frames. `limit_bytes`: the most that tensors of a frame may take.

    Raises WireMismatch for anything else than a frame.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes."""
        self._rest += data
        found = list[Frame]()
        while (frame := self._next()) is not None:
            found.append(frame)
        return found

    def _next(self) -> Frame | None:
        rest = self._rest
        if rest and bytes(rest[:4]) != _MAGIC[: len(rest)]:
            raise WireMismatch(f"wanted a frame of Gossamer's teachers, got {bytes(rest[:16])!r}")
        if len(rest) < _HEADER.size:
            return None
        _, version, said, body = _HEADER.unpack_from(rest)
        if version != _VERSION:
            raise WireMismatch(f"wanted frames of version {_VERSION}, got {version}: install one version on both hosts")
        if said > _MOST_SAID or body > self.limit_bytes:
            raise WireMismatch(
                f"wanted a message of at most {_MOST_SAID} bytes and tensors of at most {self.limit_bytes}, "
                f"got {said} and {body}"
            )
        start, end = _HEADER.size + said, _HEADER.size + said + body
        if len(rest) < end:
            return None
        envelope = read_line(bytes(rest[_HEADER.size : start]), _ENVELOPE)
        if sum(one.nbytes for one in envelope.parts) != body:
            raise WireMismatch(f"wanted tensors of {body} bytes, got shapes of another size")
        if len({one.name for one in envelope.parts}) != len(envelope.parts):
            raise WireMismatch("wanted tensors of different names, got one twice")
        tensors, at = dict[str, Tensor](), start
        for one in envelope.parts:
            tensors[one.name] = _tensor(one, rest[at : at + one.nbytes])
            at += one.nbytes
        del rest[:end]
        return Frame(envelope.said, tensors)


def _tensor(part: Part, data: bytearray) -> Tensor:
    dtype, sent = _DTYPES[part.dtype], _DTYPES[part.sent]
    if not data:
        try:
            return torch.zeros(part.shape, dtype=dtype)
        except RuntimeError:  # one dimension is 0, the product of the others is past any integer
            raise WireMismatch(f"wanted a shape that a tensor can have, got {part.shape}") from None
    return torch.frombuffer(data, dtype=sent).view(part.shape).to(dtype)


class FrameSocket:
    """A connection that sends and receives whole frames, and waits for them. `key`: what names the other side."""

    def __init__(self, connection: socket.socket, *, key: str = "") -> None:
        self.socket, self._key = connection, key
        self.reader = FrameReader()
        self._inbox = list[Frame]()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, data: bytes, *, within_s: float) -> None:
        """Send a packed frame. Raises OSError where the other side takes nothing for so many seconds."""
        self.socket.settimeout(within_s)
        rest = memoryview(data)
        while rest:  # a limit of the whole frame would be one of its size on a slow link
            rest = rest[self.socket.send(rest) :]

    def receive(self, kind: type[T], *, within_s: float | None, limit_bytes: int = 0) -> tuple[T, Mapping[str, Tensor]]:
        """Return the next message, which must be of that kind, and its tensors.

        Raises OSError where none comes within so many seconds (None: no limit; where tensors may come: where nothing
        comes for so long), WireMismatch for another one, and what a Refusal says: BadInput or RunFailed.
        """
        self.reader.limit_bytes = limit_bytes
        deadline_s = math.inf if within_s is None else time.monotonic() + within_s
        while not self._inbox:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no answer within {within_s:g} s")
            self.socket.settimeout(None if math.isinf(left_s) else left_s)
            data = self.socket.recv(_PIECE)
            if not data:
                raise ConnectionError("the other side closed the connection")
            self._inbox += self.reader.feed(data)
            if limit_bytes and within_s is not None:
                deadline_s = time.monotonic() + within_s
        frame = self._inbox.pop(0)
        return expected(frame, kind, key=self._key), frame.tensors

    def shut(self) -> None:
        """End the connection; whoever waits for a message wakes up."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and close it."""
        self.shut()
        self.socket.close()


def expected(frame: Frame, kind: type[T], *, key: str) -> T:
    """Return a frame's message. `key`: what names who sent it.

    Raises WireMismatch for one of another kind, and what a Refusal says.
    """
    said = frame.said
    if isinstance(said, Refusal):
        raise BadInput(said.message, key=key) if said.is_input else RunFailed(said.message)
    if not isinstance(said, kind):
        raise WireMismatch(f"wanted a message of kind {kind.__name__.lower()}, got {said.kind!r}")
    return said
