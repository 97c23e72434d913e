"""The log of zeroth-order training: the entries of bytes.log, one per line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.spec.errors import CheckpointMismatch
from gossamer.sync._float8 import NOT_FINITE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """A log entry with one step's messages: applied to equal parameters, it repeats the update bit for bit.

    `codes` are those of rank 0's directions, then rank 1's, ...; empty where the step was rejected. `rate` and `clip`
    are the learning rate and clipping in force, `labels` the valid labels of every rank. `buffers`: whether the
    forwards also changed buffers of the model, which the entry does not record.
    """

    step: int
    rate: float
    clip: float
    labels: tuple[float, ...]
    codes: bytes
    buffers: bool = False

    def line(self) -> dict[str, Any]:
        """Return the entry as a dict for JSON."""
        return {
            "kind": "step",
            "step": self.step,
            "rate": self.rate,
            "clip": self.clip,
            "labels": list(self.labels),
            "codes": self.codes.hex(),
            "buffers": self.buffers,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterChecksum:
    """A log entry with a checksum of the parameters after `step` steps.

    `begins`: a process started from these parameters; earlier lines about later steps belong to an abandoned history.
    """

    step: int
    parameters: str  # their names, shapes and types
    checksum: int
    begins: bool = False

    def line(self) -> dict[str, Any]:
        """Return the entry as a dict for JSON."""
        return {
            "kind": "mark",
            "step": self.step,
            "parameters": self.parameters,
            "checksum": self.checksum,
            "begins": self.begins,
        }


_KINDS = {
    "step": {"step": int, "rate": float, "clip": float, "labels": list, "codes": str, "buffers": bool},
    "mark": {"step": int, "parameters": str, "checksum": int, "begins": bool},
}


def parsed(line: Mapping[str, Any]) -> StepMessage | ParameterChecksum:
    """Return the log entry of a decoded line. Raise CheckpointMismatch where it is none of this format."""
    wanted = _KINDS.get(str(line.get("kind")))
    if wanted is None or line.keys() != {"kind", *wanted}:
        kinds = " or ".join(_KINDS)
        raise CheckpointMismatch(f"wanted an entry of kind {kinds} with its keys, got the keys {sorted(line)}")
    values = {name: _checked(name, line[name], kind) for name, kind in wanted.items()}
    if line["kind"] == "mark":
        return ParameterChecksum(**values)
    labels = tuple(_checked("labels", each, float) for each in values.pop("labels"))
    try:
        codes = bytes.fromhex(values.pop("codes"))
    except ValueError as error:
        raise CheckpointMismatch(f"codes: {error}") from None
    if not labels or len(codes) % len(labels):
        raise CheckpointMismatch(f"codes: wanted as many for each of {len(labels)} ranks, got {len(codes)} in all")
    if NOT_FINITE in codes:
        raise CheckpointMismatch("codes: wanted finite steps only, got the code of one that is not finite")
    return StepMessage(**values, labels=labels, codes=codes)


def _checked(name: str, value: Any, kind: type) -> Any:
    is_number = kind in (int, float)
    is_kind = type(value) is kind
    if not is_kind or (is_number and not 0 <= value < math.inf):
        least = " of 0 or more" if is_number else ""
        raise CheckpointMismatch(f"{name}: wanted {kind.__name__}{least}, got {value!r:.60}")
    return value
