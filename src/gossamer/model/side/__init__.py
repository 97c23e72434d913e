"""Side networks: a small trained network beside a frozen model, one kind per file.

Nothing is back-propagated through the model (the backbone), which runs as it is, without a graph. The outputs of its
blocks, h_1 ... h_N, are tapped; the side network makes one correction of them, which is added to h_N. What follows
(norm and head, or the late blocks that a kind keeps) is frozen too, but gradients pass it on their way to the side
network. A side network starts as a correction of 0.

Its tensors are parameters of the model under `side_network.`, so exchanges, sharded states and checkpoints treat them
as any weight. What the model computes needs every tap, so it stays in one stage.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gossamer.model.quantized_linear import quantized_layers
from gossamer.model.seeded import seeded
from gossamer.model.side._aggregation import Aggregation
from gossamer.model.side._route import SideRoute
from gossamer.model.side._tokens import check_tokens, tokens_of
from gossamer.model.side._width import widths_of
from gossamer.model.unit_seeds import mix
from gossamer.model.units import block_names, unit_names
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.registry import Registry
from gossamer.spec.suggest import nearest

__all__ = [
    "CHILD",
    "KEY",
    "REGISTRY",
    "SideNetwork",
    "attach",
    "build",
    "check_trained",
    "names",
    "redraw",
    "route_of",
    "side_tensors",
]

KEY = "model.side"
CHILD = "side_network"  # attribute of the model


class SideNetwork(ABC):
    """A side network: a frozen dataclass of settings.

    `reduction`: the width of the side network is that of the last tap / reduction. `tokens`: whose token the output
    feature of a sequence is: causal (every token is that of the tokens up to it), first, last, mean; auto: causal for a
    causal language model. `taps`: patterns (regular expressions) of the modules to tap, each found somewhere in a path;
    empty: the repeated blocks, or else all units but the last. `widths`: of the tapped outputs; empty: read from the
    model. `keeps`: the number of last taps that come after the side network, with a graph.
    """

    reduction: int
    tokens: str
    taps: tuple[str, ...]
    widths: tuple[int, ...]
    takes_late: ClassVar[bool] = False

    @property
    def keeps(self) -> int:
        return 0

    @abstractmethod
    def aggregation(self, widths: Sequence[int], width: int) -> Aggregation:
        """Return the trained part for taps of these widths, the last of them the output feature, itself `width` wide"""

    def check(self) -> None:
        """Raise BadInput for settings that no model could be given."""
        if self.reduction < 1:
            raise bad_input(wanted="a reduction of at least 1", got=str(self.reduction), do="write 4, 8 or 16", key=KEY)
        check_tokens(self.tokens, key=KEY)


REGISTRY: Registry[SideNetwork] = Registry(__name__, SideNetwork)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


def attach(module: nn.Module, side: SideNetwork, seed: int) -> Callable[[], None]:
    """Put `side` beside the blocks of `module`, in place, and freeze everything else. Return what undoes both.

    The model computes what it computed before. Initial values are a function of `seed` and of each tensor's name.
    Raises BadInput for a model that it does not fit, which stays as it was.
    """
    if hasattr(module, CHILD):
        raise bad_input(
            wanted="a model without a side network",
            got=f"one that has an attribute {CHILD}",
            do="load the model without it, or rename that attribute: a side network takes this name",
            key=KEY,
        )
    taps = _taps(module, side)
    widths = widths_of(module, taps, side.widths, key=f"{KEY}.widths")
    width = max(1, widths[-1] // side.reduction)
    aggregation = side.aggregation(widths, width)
    like = next(module.parameters())
    route = SideRoute(aggregation.to(device=like.device, dtype=like.dtype), tokens_of(module, side.tokens, key=KEY))
    trained = [p for p in module.parameters() if p.requires_grad]
    module.requires_grad_(False)
    hooks = route.hook(module, taps)
    module.add_module(CHILD, route)
    redraw(module, frozenset(name for name, _ in side_tensors(module)), seed)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        del module._modules[CHILD]
        for p in trained:
            p.requires_grad_(True)

    return undo


def _taps(module: nn.Module, side: SideNetwork) -> tuple[str, ...]:
    """Return the paths of the taps, the last of them where the correction is added."""
    units = unit_names(module)
    found: Sequence[str] = block_names(module, units)
    if not found:  # blocks whose weights are held in blocks of numbers have few parameters: the longest list, then
        found = _longest_list(module) if quantized_layers(module) else units[:-1]
    if side.taps:
        found = _found([path for path, _ in module.named_modules() if path], side.taps)
    found = found[: len(found) - side.keeps]
    if len(found) < 2:
        raise bad_input(
            wanted=f"at least {2 + side.keeps} repeated blocks to tap",
            got=f"{len(found) + side.keeps} ({', '.join(found) or 'none'})",
            do="name modules whose outputs to tap as taps (regular expressions of their paths), or use model.adapter",
            key=f"{KEY}.taps",
        )
    return tuple(found)


def _longest_list(module: nn.Module) -> list[str]:
    lists = [(len(one), path) for path, one in module.named_modules() if isinstance(one, nn.ModuleList)]
    length, path = max(lists, default=(0, ""))
    return [f"{path}.{n}" for n in range(length)]


def _found(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the paths in which a pattern is found, in their order; raise BadInput for one that is found in none."""
    for pattern in patterns:
        try:
            matched = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=f"{KEY}.taps") from None
        if not matched:
            raise BadInput(f"no module has {pattern!r} in its path: {nearest(pattern, paths)}", key=f"{KEY}.taps")
    return [path for path in paths if any(re.search(pattern, path) for pattern in patterns)]


def route_of(module: nn.Module) -> SideRoute | None:
    """Return the side network of `module`, with its hooks; None if it has none."""
    inner = getattr(module, "_orig_mod", module)
    found = inner._modules.get(CHILD)
    return found if isinstance(found, SideRoute) else None


def side_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the side network in `module`; none if it has none."""
    route = route_of(module)
    if route is not None:
        yield from ((f"{CHILD}.{name}", p) for name, p in route.named_parameters())


@torch.no_grad()
def redraw(module: nn.Module, names: frozenset[str], seed: int) -> None:
    """Set the side network's tensors that are named in `names` to their initial values."""
    for name, tensor in side_tensors(module):
        if name in names:
            with seeded(mix(seed, zlib.crc32(name.encode()))):
                Aggregation.draw(name, tensor)


def check_trained(module: nn.Module) -> None:
    """Raise BadInput where a parameter is to be trained that no gradient reaches: one before the side network."""
    route = route_of(module)
    if route is None:
        return
    after = {id(p) for path in _after(module, route.taps[-1]) for p in module.get_submodule(path).parameters()}
    before = {
        id(p)
        for path in unit_names(module)
        if path not in _after(module, route.taps[-1])
        for p in module.get_submodule(path).parameters()
    }
    for name, p in module.named_parameters():
        if p.requires_grad and (id(p) not in after or id(p) in before):
            raise bad_input(
                wanted="parameters to train that are after the side network (the head), where gradients pass",
                got=f"{name}, which is before it",
                do="leave it out of model.unfreeze, or use model.adapter instead of model.side",
                key="model.unfreeze",
            )


def _after(module: nn.Module, last: str) -> frozenset[str]:
    """Return the units behind the last tap, by order of registration, and the side network."""
    units = unit_names(module)
    place = max((n for n, path in enumerate(units) if last == path or last.startswith(path + ".")), default=-1)
    return frozenset(path for path in units[place + 1 :]) | {CHILD}
