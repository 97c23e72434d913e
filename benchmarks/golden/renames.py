"""Configuration keys and words that later commits rename.

The runs are written in the keys of the first commit. A commit that renames keys or words appends one `Renames` to
`RENAMES`; the tuple stays in the order of the commits. An example:

    Renames(
        marker="`plan.sharding`",
        names={
            "train": {"clip": "max_grad_norm"},
            "plan": {"states": "sharding", "share": "batch_fractions", "tree": "recursive_doubling"},
            "plan.states": {"whole": "none"},
            "plan.sync": {"every": "sync_every"},
            "plan.sync.zero_one": {"every": "local_step_clipper"},
        },
    )
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """The renames of one commit.

    marker: text in docs/reference/*.md that only trees from this commit on contain.
    names: dotted key before the commit -> {old name: new name}. A rename applies to keys and to text values at any
    depth below its dotted key; where several dotted keys match, the longest wins.
    """

    marker: str
    names: Mapping[str, Mapping[str, str]]

    def apply(self, values: Any, key: str = "") -> Any:
        """Rename the keys and words of `values`, which stand at the dotted `key`."""
        if isinstance(values, Mapping):
            return {self._rename(k, key): self.apply(v, f"{key}.{k}" if key else k) for k, v in values.items()}
        if isinstance(values, list):
            return [self.apply(value, key) for value in values]
        return self._rename(values, key) if isinstance(values, str) else values

    def _rename(self, name: str, key: str) -> str:
        while key:
            if (new := self.names.get(key, {}).get(name)) is not None:
                return new
            key = key.rpartition(".")[0]
        return name


RENAMES: tuple[Renames, ...] = ()


def apply_all(renames: Iterable[Renames], values: Any) -> Any:
    """Apply the renames of several commits, one after the other."""
    for each in renames:
        values = each.apply(values)
    return values
