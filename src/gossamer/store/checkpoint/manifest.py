"""The manifest of a checkpoint: its shards and slices, sealed with a digest that reveals any altered byte."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.spec.errors import CheckpointMismatch, RunFailed, bad_input
from gossamer.store.checkpoint.checksum import digest, dtype_of
from gossamer.store.checkpoint.shard import Placed, Shard
from gossamer.store.slices import Slice

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class RankManifest:
    """The part of the manifest that one rank contributes: its shard and its `meta`."""

    step: int
    rank: int
    ranks: int
    shard: Shard
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a complete checkpoint: the parts of all ranks, in rank order."""

    step: int
    parts: tuple[RankManifest, ...]


def merge(parts: Sequence[RankManifest]) -> Manifest:
    """Merge the parts of all ranks; raises RunFailed where slices leave a gap, overlap, or replicas disagree."""
    parts = sorted(parts, key=lambda part: part.rank)
    boxes: dict[tuple[str, int], list[tuple[int, Placed]]] = defaultdict(list)
    for part in parts:
        for placed in part.shard.placed:
            boxes[placed.where.name, placed.where.replica].append((part.rank, placed))
    for held in boxes.values():
        _check_tiling(held)
    return Manifest(parts[0].step, tuple(parts))


def _check_tiling(held: list[tuple[int, Placed]]) -> None:
    first_rank, first = held[0]
    seen: dict[Slice, tuple[int, Placed]] = {}
    for rank, placed in held:
        where = placed.where
        if (where.shape, placed.dtype) != (first.where.shape, first.dtype):
            raise RunFailed(
                f"{where.name}: rank {first_rank} saves it as {first.dtype} {first.where.shape}, "
                f"rank {rank} as {placed.dtype} {where.shape}"
            )
        other_rank, other = seen.setdefault(where, (rank, placed))
        if other.crc != placed.crc:
            raise RunFailed(
                f"{where} should be the same on all ranks, but differs between ranks {other_rank} and {rank}"
            )
    boxes = sorted(seen, key=lambda where: where.start)
    for i, box in enumerate(boxes):
        for after in boxes[i + 1 :]:
            if box.overlap(after.start, after.size):
                raise RunFailed(f"{box} (rank {seen[box][0]}) and {after} (rank {seen[after][0]}) overlap")
    got, wanted = sum(box.numel for box in boxes), math.prod(first.where.shape)
    if got != wanted:
        raise RunFailed(f"{first.where.name}: its slices hold {got} of {wanted} elements of shape {first.where.shape}")


def seal(body: Any) -> bytes:
    """Return `body` as JSON with its own digest in front."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return _sealed(text)


def _sealed(text: bytes) -> bytes:
    return b'{"gossamer_checkpoint":%d,"blake2b":"%s","body":%s}\n' % (FORMAT, digest(text).encode(), text)


def unseal(path: Path) -> Any:
    """Return the body of a sealed file; raises CheckpointMismatch where it is missing, altered or of another format."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointMismatch(f"{path}: cannot be read: {error.strerror}") from None
    _, found, rest = data.partition(b'"body":')
    text = rest[:-2]
    if found and data == _sealed(text):
        return json.loads(text)
    raise CheckpointMismatch(f"{path}: {_why_not(data)}")


def _why_not(data: bytes) -> str:
    try:
        version = json.loads(data)["gossamer_checkpoint"]
    except (ValueError, KeyError, TypeError):
        return f"is not a manifest, or was altered or truncated ({len(data)} bytes)"
    if version != FORMAT:
        return f"has format {version}, this version reads format {FORMAT}; it may have been altered"
    return "was altered: its digest does not match its contents"


def encode_part(part: RankManifest) -> dict[str, Any]:
    """Return one rank's part of the checkpoint manifest as a JSON value, which `seal` writes with a digest."""
    shard = part.shard
    slices = [
        {
            "name": placed.where.name,
            "dtype": placed.dtype,
            "shape": placed.where.shape,
            "start": placed.where.start,
            "size": placed.where.size,
            "replica": placed.where.replica,
            "bytes": [placed.offset, placed.offset + placed.size_bytes],
            "crc32": f"{placed.crc:08x}",
        }
        for placed in shard.placed
    ]
    return {
        "step": part.step,
        "rank": part.rank,
        "ranks": part.ranks,
        "file": shard.file,
        "bytes": shard.size_bytes,
        "header_bytes": shard.header_bytes,
        "header_blake2b": shard.header_digest,
        "slices": slices,
        "meta": part.meta,
    }


def decode_part(body: Any, path: Path) -> RankManifest:
    """Return the part that `encode_part` encoded; raises CheckpointMismatch for a sealed file without one."""
    try:
        placed = tuple(_decode_slice(each) for each in body["slices"])
        if Path(body["file"]).name != body["file"]:
            raise ValueError(f"{body['file']!r} is no file of this folder")
        shard = Shard(body["file"], body["bytes"], body["header_bytes"], body["header_blake2b"], placed)
        return RankManifest(body["step"], body["rank"], body["ranks"], shard, body["meta"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointMismatch(f"{path}: is not the manifest of one rank's shard: {error!r}") from None


def _decode_slice(body: Any) -> Placed:
    shape, start, size = (tuple(body[key]) for key in ("shape", "start", "size"))
    low, high = body["bytes"]
    dtype_of(body["dtype"])
    return Placed(
        Slice(body["name"], shape, start, size, body["replica"]), body["dtype"], low, high - low, int(body["crc32"], 16)
    )


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the JSON value of a manifest, for `seal`."""
    return {"step": manifest.step, "parts": [encode_part(part) for part in manifest.parts]}


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest in `folder`; raises CheckpointMismatch where it is damaged, or of another step than `step`."""
    path = folder / MANIFEST
    body = unseal(path)
    if not isinstance(body, dict) or "parts" not in body:
        raise CheckpointMismatch(f"{path}: is not the manifest of a complete checkpoint")
    if body["step"] != step:
        raise CheckpointMismatch(f"{path}: belongs to step {body['step']}, not to {folder.name}")
    return Manifest(step, tuple(decode_part(part, path) for part in body["parts"]))


def check_json(value: Any, path: str = "meta") -> None:
    """Raise BadInput where `value` would not come back from JSON unchanged: tuples, integer keys, NaN, objects."""
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return
    inside: Iterable[tuple[str, Any]]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        inside = ((f"{path}.{key}", each) for key, each in value.items())
    elif isinstance(value, list):
        inside = ((f"{path}[{i}]", each) for i, each in enumerate(value))
    else:
        raise bad_input(
            wanted="what JSON holds (null, true, numbers that are finite, text, lists, objects with text keys)",
            got=f"{type(value).__name__} {value!r:.60}",
            do="convert it, or save it as a tensor",
            key=path,
        )
    for where, each in inside:
        check_json(each, where)
