"""Trace of the parameters and buffers that a forward reads outside of their units, and of those that it writes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor, nn

from gossamer.model.split.dataflow import ParameterUse


@dataclass
class ParameterTrace:
    """A trace of the parameters and buffers of `module` through one forward. Positions are those of `DataFlow`."""

    module: nn.Module
    units: tuple[str, ...]
    key: Callable[[Tensor], int]
    loose: dict[str, set[int]] = field(default_factory=dict)  # read by the code between units -> positions
    lent: dict[str, set[int]] = field(default_factory=dict)  # read by other units -> their calls
    overwritten: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.static = self._static(self.module)
        self.owned = {name: self._static(self.module.get_submodule(name)).keys() for name in self.units}
        self.kept = self._kept(self.module)

    def read(self, key: int, at: int, unit: str | None) -> None:
        """Record a read of the parameter or buffer in storage `key` at `at`: by a call of `unit`, or between units."""
        name = self.static[key]
        if unit is None:
            self.loose.setdefault(name, set()).add(at)
        elif key not in self.owned[unit]:
            self.lent.setdefault(name, set()).add(at)

    def write(self, keys: Collection[int]) -> bool:
        """Record writes to storages; return whether a module holds one of them."""
        self.overwritten.update(name for key in keys for name in self.kept.get(key, ()))
        return any(key in self.kept for key in keys)

    def use(self) -> ParameterUse:
        """Return what was traced, for the data flow."""
        return ParameterUse(
            loose={name: frozenset(at) for name, at in self.loose.items()},
            lent={name: frozenset(at) for name, at in self.lent.items()},
            written=frozenset(self.overwritten),
        )

    def _static(self, module: nn.Module) -> dict[int, str]:
        """Return the canonical name of every parameter and buffer, by storage."""
        found: dict[int, str] = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found.setdefault(self.key(tensor), name)
        return found

    def _kept(self, module: nn.Module) -> dict[int, tuple[str, ...]]:
        """Return the parameters, buffers and attributes of modules in each storage."""
        found: dict[int, tuple[str, ...]] = {}
        for path, inner in module.named_modules():
            for name, held in [*inner._parameters.items(), *inner._buffers.items(), *vars(inner).items()]:
                if isinstance(held, Tensor):
                    key = self.key(held)
                    found[key] = (*found.get(key, ()), f"{path}.{name}" if path else name)
        return found
