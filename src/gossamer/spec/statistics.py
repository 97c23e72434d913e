"""What a run has measured and hands to an adaptive policy: what settings lose, what they send, how links are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.spec.method_config import Written
from gossamer.spec.network import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One measurement, the same on every rank. Rows are parameters, columns are candidate settings.

    error:    Euclidean norm of what a candidate loses of that parameter's mean gradient.
    nbytes:   what a rank sends in a step with that candidate.
    default:  the candidate that serves all of these parameters where no policy adapts it.
    exposed:  by parameter, how much one of its bytes counts: 1 for one that is waited for, less for one that
              compute hides. Empty: all count alike.
    crossing: for a pipeline, bytes of the uncompressed tensor that crosses a link ("0>1") per micro-batch.
    """

    names: tuple[str, ...]
    numel: tuple[int, ...] = ()
    candidates: tuple[Written, ...] = ()
    error: tuple[tuple[float, ...], ...] = ()
    nbytes: tuple[tuple[int, ...], ...] = ()
    default: Written = ""
    exposed: tuple[float, ...] = ()
    crossing: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, table in (("error", self.error), ("nbytes", self.nbytes)):
            assert not table or len(table) == len(self.names), f"{name} has {len(table)} rows for {len(self.names)}"
            assert all(len(row) == len(self.candidates) for row in table), f"a row of {name} misses candidates"
        for name, column in (("numel", self.numel), ("exposed", self.exposed)):
            assert not column or len(column) == len(self.names), f"{name} has {len(column)} of {len(self.names)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Links that differ, one by one, measured under the load they will carry.

    `up`, `down`: every rank's own way out and in, by rank; no `down`: the ways in are never the narrow ones.
    `between`: the links of a pipeline, by name ("0>1").
    """

    up: tuple[Link, ...] = ()
    down: tuple[Link, ...] = ()
    between: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.down) in (0, len(self.up)), f"{len(self.up)} ways out, {len(self.down)} ways in"
