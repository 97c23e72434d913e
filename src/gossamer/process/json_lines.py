"""Messages between our own processes: one JSON object per line, of limited length, validated by a schema."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from gossamer.spec.errors import WireMismatch

LIMIT_BYTES = 1 << 20
T = TypeVar("T")


class Said(BaseModel):
    """The base class of all messages: exactly the declared fields, of exactly the declared types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class JsonLineReader:
    """A splitter of a byte stream into lines. Raises WireMismatch for a line longer than `limit_bytes`."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        longest = max(len(line) for line in (*lines, self._rest))
        if longest > self._limit_bytes:
            raise WireMismatch(
                f"wanted a message of at most {self._limit_bytes} bytes, got {longest}: the sender is not Gossamer"
            )
        return lines


def as_unicode(text: str) -> str:
    """Return `text` with ? for what is no Unicode: names of files may hold that, JSON may not."""
    return text.encode("utf-8", "replace").decode()


def write_line(message: Said) -> bytes:
    """Encode a message as the line that `read_line` decodes."""
    return message.model_dump_json().encode() + b"\n"


def read_line(line: bytes, kind: TypeAdapter[T]) -> T:
    """Decode the message of one line; raises WireMismatch when it does not match `kind`."""
    try:
        return kind.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise WireMismatch(
            f"wanted a message of this version of Gossamer, got {line[:80]!r} (field {where}: {first['msg']}): "
            "install the same version on all hosts"
        ) from None
