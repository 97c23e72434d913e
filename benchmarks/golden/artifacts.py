"""Reads a finished run: metrics, bytes, tensors, plan.

It parses the files of the run directory itself. Readers inside gossamer may move or change between two commits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from golden.renames import Renames, apply_all

Items = dict[str, Any]  # name of an item -> value

# Fields of each kind of record that do not change from run to run, unlike times, rates and peak memory.
METRICS = {
    "step": ("committed", "loss", "weight", "tokens", "samples", "lr", "grad_norm"),
    "evaluation": ("loss", "bits_per_byte", "sequences"),
    "islands": ("losses", "weights", "rejected"),
    "verification": ("distance", "named"),
    "proof": ("outcome", "losses", "tensors", "proved"),
    "sample": ("text",),
    "end": ("outcome",),
}
SKIPPED_OF_PLAN = ("format", "reasons")  # reasons are prose
BYTES_OF_FORECAST = ("state_bytes", "sent_bytes", "wire_bytes")
# PyTorch seeds its default generator anew in every process, and training draws from keyed generators alone.
SKIPPED_TENSORS = ("rng/torch",)


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The items of a finished run that two commits must share.

    metrics: losses, gradient norms, learning rates, sample counts. bytes: payload by step and link, metered by rank 0
    and forecast for all ranks. tensors: sha256 by checkpoint and canonical name. plan: decisions of the planner.
    """

    metrics: Items
    bytes: Items
    tensors: Items
    plan: Items


def read_run(directory: Path, later: Iterable[Renames], *, is_async: bool) -> Artifacts:
    """Read a run directory.

    later: renames that its commit lacks; they bring the plan to the newest names. is_async: sum the bytes of all steps.
    """
    records = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    plan = apply_all(later, {"plan": yaml.safe_load((directory / "plan.yaml").read_text())})["plan"]
    forecast = plan.pop("forecast")
    payload = _total(records) if is_async else _payload(records)
    payload |= dict(_flatten({key: forecast[key] for key in BYTES_OF_FORECAST}, "forecast"))
    decisions = {key: value for key, value in plan.items() if key not in SKIPPED_OF_PLAN}
    tensors: Items = {}
    for manifest in sorted((directory / "checkpoints").glob("step-????????/manifest.json")):
        tensors |= {f"{manifest.parent.name} {name}": value for name, value in _hash_tensors(manifest).items()}
    return Artifacts(_metrics(records), payload, tensors, dict(_flatten(decisions, "")))


def read_wrap_ranks(folder: Path) -> Artifacts:
    """Read the files that the ranks of wrap_loop.py wrote."""
    parts: dict[str, Items] = {"metrics": {}, "bytes": {}, "tensors": {}}
    for file in sorted(folder.glob("rank-*.json")):
        for part, items in json.loads(file.read_text()).items():
            parts[part] |= {f"{file.stem} {key}": value for key, value in items.items()}
    return Artifacts(**parts, plan={})


def _metrics(records: Iterable[Mapping[str, Any]]) -> Items:
    found: Items = {}
    for record in records:
        for field in METRICS.get(record["kind"], ()):
            found[_number(f"{record['kind']} {record.get('step', 0)} {field}", found)] = record[field]
    return found


def _payload(records: Iterable[Mapping[str, Any]]) -> Items:
    found: Items = {}
    for record in records:
        if record["kind"] == "step":
            for link, count in record["wire_bytes"].items():
                found[_number(f"step {record['step']} {link}", found)] = count
    return found


def _total(records: Iterable[Mapping[str, Any]]) -> Items:
    found: Items = {}
    for record in records:
        for link, count in record.get("wire_bytes", {}).items():
            found[f"all steps {link}"] = found.get(f"all steps {link}", 0) + count
    return found


def _number(name: str, found: Items) -> str:
    """Append a number if the name is taken: a step appears again after a retry or a resume."""
    times = sum(key == name or key.startswith(f"{name} #") for key in found)
    return f"{name} #{times + 1}" if times else name


def _flatten(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf; lists and empty mappings are leaves."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _flatten(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _hash_tensors(manifest: Path) -> Items:
    """Assemble every tensor of a checkpoint from its slices and hash it, whichever ranks wrote the slices."""
    slices: dict[str, Mapping[str, Any]] = {}
    tensors: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    for part in json.loads(manifest.read_text())["body"]["parts"]:
        shard = (manifest.parent / part["file"]).read_bytes()
        for piece in part["slices"]:
            if piece["name"] not in SKIPPED_TENSORS:
                low, high = piece["bytes"]
                name = piece["name"] if piece["replica"] < 0 else f"{piece['name']}@rank{piece['replica']}"
                slices.setdefault(name, piece)
                _insert(tensors, name, piece, shard[low:high])
    return {
        name: f"{piece['dtype']} {piece['shape']} {hashlib.sha256(tensors[name].tobytes()).hexdigest()}"
        for name, piece in slices.items()
    }


def _insert(tensors: dict[str, Any], name: str, piece: Mapping[str, Any], data: bytes) -> None:
    """Copy a slice's bytes into its tensor, whose last dimension is the bytes of one element."""
    shape, start, size = piece["shape"], piece["start"], piece["size"]
    width = len(data) // max(1, int(np.prod(size)))
    if name not in tensors or tensors[name].shape[-1] == 0:  # an empty slice does not tell the width
        tensors[name] = np.zeros((*shape, width), np.uint8)
    if width:
        box = tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))
        tensors[name][box] = np.frombuffer(data, np.uint8).reshape(*size, width)
