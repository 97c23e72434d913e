"""Measurements that a run hands to an adaptive compression policy: compression errors, bytes sent, links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gossamer.spec.method_config import Written
from gossamer.spec.network import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One measurement for adaptive compression, equal on every rank: a row per parameter, a column per candidate
    setting.

        error:    Euclidean norm of a candidate's compression error on that parameter's mean gradient.
        nbytes:   bytes that a rank sends in a step with that candidate.
        default:  the candidate for all of these parameters where no policy adapts them.
        exposed:  by parameter, the weight of one of its bytes: 1 for exposed communication, less where compute
                  overlaps with it. Empty: all weigh the same.
        crossing: for a pipeline, bytes of the uncompressed tensor sent over a link ("0>1") per micro-batch.
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
    """Links that differ from rank to rank, each measured under the load it will carry.

    `up`, `down`: uplink and downlink of every rank, by rank; empty `down`: the downlinks are never the bottleneck.
    `between`: the links of a pipeline, by name ("0>1").
    """

    up: tuple[Link, ...] = ()
    down: tuple[Link, ...] = ()
    between: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.down) in (0, len(self.up)), f"{len(self.up)} ways out, {len(self.down)} ways in"
