"""Savers: what lets a model train in less memory, for a price in seconds (`plan.savers`). One method per file.

A saver changes the module of one rank (the whole model, or the rank's stages) so that its forward and backward keep
less. To add one:

- Write `saver/NAME.py`: one final frozen dataclass, a subclass of `Saver`, whose fields are its settings. It is found
  by its file name, and `plan.savers: [NAME]` or `[{NAME: {field: value}}]` builds it.
- Declare in its class variables what it cannot be combined with; `recipe/conflicts/savers.py` turns these into errors.
  What only the module shows (a head that cannot be tiled) is a BadInput of `install`, with the key `plan.savers`.
- `install(module, site)` changes the module, and returns an `Installed` that undoes it. It may change forwards and set
  hooks; parameters keep their names. A saver that computes the loss in another way returns its `objective`: it is
  called with the output of the module's forward and the batch in place of `site.objective`. Whatever is not a training
  forward (`module.training` false: evaluation, samples, metrics) must give what it gave before: logits, too. State of a
  saver is in objects that `install` makes, never in the dataclass.
- `run/engine.py` calls `install_all` once for a run, when the units are keyed and compiled, in the order of
  `plan.savers`: each is on top of those before it. The memory forecast does the same to a copy of the model without
  data (`site.is_outline`), and runs it on shapes alone, so that `--dry-run` counts what the saver really keeps. There a
  saver must not read values.
- Tests: `tests/saver/test_NAME.py`; `tests/contracts/test_savers.py` trains every saver beside plain training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from gossamer.loss import Loss
from gossamer.saver._cheapest_set import UnitBytes, UnitChoice, cheapest_set, least_budget
from gossamer.sharding import TiledWeight
from gossamer.spec.registry import Registry

__all__ = [
    "REGISTRY",
    "Installed",
    "Saver",
    "Site",
    "UnitBytes",
    "UnitChoice",
    "build",
    "cheapest_set",
    "install_all",
    "least_budget",
    "names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a saver is installed.

    `units`: the names of the model's units, each with its own random state. `objective`: what computes the loss from
    the output of a training forward. `in_stages`: the module is that of some pipeline stages; the units in `elsewhere`
    are those of other ranks' stages, and placeholders in it. `is_outline`: it has shapes alone, to count memory.
    `batch`: training rows on the module's device, as few as the loss takes; None where there are none. `rows`: how many
    a micro-batch of this rank has. `drawing`: the context in which a forward and its backward draw the random numbers
    of a micro-batch; `computing`: the one in which a forward runs in the precision of the run.
    """

    units: tuple[str, ...]
    objective: Loss
    in_stages: bool = False
    elsewhere: frozenset[str] = frozenset()
    is_outline: bool = False
    batch: Mapping[str, Tensor] | None = None
    rows: int = 1
    drawing: Callable[[], AbstractContextManager[object]] = nullcontext
    computing: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A saver in place. `remove` undoes it; `objective`: what computes the loss from now on. `told`: a line for the
    log, such as what it saves; "" for none. `tiled`: the weights of layers that it runs in tiles.
    """

    remove: Callable[[], None]
    objective: Loss
    told: str = ""
    tiled: tuple[TiledWeight, ...] = ()


class Saver(ABC):
    """A way to save memory: a frozen dataclass of settings.

    `is_exact`: trained weights are bit-equal to those of plain training. `with_sharded_parameters`: it works where a
    unit's parameters are there only while the unit runs. `excludes`: names of other savers that it cannot be combined
    with. `before`: of those that it is to be named before.
    """

    is_exact: ClassVar[bool] = True
    with_sharded_parameters: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()

    @property
    def recomputes_stages(self) -> bool:
        """Return whether, in stages, it is the schedule that recomputes the forward of a whole stage."""
        return False

    @abstractmethod
    def install(self, module: nn.Module, site: Site) -> Installed:
        """Change `module` so that training it takes less memory.

        Raises BadInput for a module that it cannot serve; the module is then as it was.
        """


def install_all(savers: Sequence[Saver], module: nn.Module, site: Site) -> Installed:
    """Install savers on a module in their order, each on top of those before it. Raises BadInput as `install` does."""
    there: list[Installed] = []

    def remove() -> None:
        while there:
            there.pop().remove()

    for saver in savers:
        try:
            there.append(saver.install(module, site))
        except BaseException:
            remove()
            raise
        site = replace(site, objective=there[-1].objective)
    told = "; ".join(one.told for one in there if one.told)
    tiled = tuple(weight for one in there for weight in one.tiled)
    return Installed(remove=remove, objective=site.objective, told=told, tiled=tiled)


REGISTRY: Registry[Saver] = Registry(__name__, Saver)
names = REGISTRY.names
build = REGISTRY.build
