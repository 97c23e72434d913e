"""A validation set of a run: its sequences, and what tells it from another one."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.run.batches import Batches


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """The sequences of a validation set. `fingerprint`: equal for equal data; "": not known."""

    batches: Batches
    fingerprint: str = ""
