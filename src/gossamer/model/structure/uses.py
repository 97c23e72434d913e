"""How a traced forward uses its parameters: what reads, writes and scales each of their dims, and the norms."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.model.structure.dimension import Dimension

# How a parameter's dim is used.
READS, WRITES, INDEXED, ADDED, SCALES, NORM_SCALE, NORM_SHIFT = (
    *("reads", "writes", "indexed", "added", "scales", "norm_scale", "norm_shift"),
)


@dataclass(frozen=True, slots=True, eq=False)
class TracedNorm:
    """A normalization over the last dim of a tensor. `weight` and `bias` are set when they are seen."""

    kind: str  # "layer" or "rms"
    eps: float
    dim: Dimension
    names: dict[str, str] = field(default_factory=dict)  # "weight", "bias" -> parameter


@dataclass(slots=True)
class Uses:
    """How parameters are used: (parameter, dim) -> how; and which normalization a parameter reads (None: no norm).

    span: the numbers of the first and the last operator that takes a parameter; tables: those that token ids look up.
    """

    of: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    norms_read: dict[str, set[TracedNorm | None]] = field(default_factory=dict)
    norms: list[TracedNorm] = field(default_factory=list)
    span: dict[str, tuple[int, int]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)

    def add(self, name: str, dim: int | None, how: str) -> None:
        """Note that a dim of a parameter is used so; None: a dim that the parameter does not have."""
        if dim is not None:
            self.of.setdefault((name, dim), set()).add(how)

    def take(self, name: str, operator: int) -> None:
        """Note that operator number `operator` takes a parameter."""
        self.span[name] = (self.span.get(name, (operator,))[0], operator)
