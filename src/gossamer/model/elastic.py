"""Networks whose inner widths and depth can shrink: a subnet is slices of the whole network's tensors.

Found by structure:
    width   an nn.Sequential whose first and last layers with weights are nn.Linear or nn.Conv2d, as many outputs of the
            first as inputs of the last, with batch norms of that many features and layers without tensors between
            them: a subnet has the first k of these hidden features
    depth   an nn.ModuleList of two or more blocks, of which a subnet has the first ones; the others give their input
            back, so a block must be residual: of a tensor, one of the same shape
Inputs and outputs of such a stack keep their width. A subnet computes with views: its gradients are the whole's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.spec.errors import bad_input

_WEIGHTED = (nn.Linear, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True, slots=True)
class Subnet:
    """What a subnet has: hidden features of each elastic stack, and blocks of each elastic list, by name."""

    widths: tuple[tuple[str, int], ...]
    depths: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """An elastic nn.Sequential. `slices`: names of tensors and the dimension of hidden features in each."""

    name: str
    hidden: int
    slices: tuple[tuple[str, int], ...]


class Elastic:
    """The elastic parts of a module, and what its subnets compute. It changes nothing in the module."""

    def __init__(self, module: nn.Module) -> None:
        """Find the parts. Raises BadInput for a module without any, and for a block that is in several places."""
        self.module = module
        self._stacks = tuple(_stacks(module))
        self._lists = tuple(
            (name, len(one)) for name, one in module.named_modules() if isinstance(one, nn.ModuleList) and len(one) > 1
        )
        if not self._stacks and not self._lists:
            raise bad_input(
                wanted="a network with elastic widths (an nn.Sequential from nn.Linear or nn.Conv2d to another) or an "
                "elastic depth (an nn.ModuleList of blocks)",
                got=f"a {type(module).__name__} with neither",
                do="write its blocks so",
                key="model.factory",
            )

        for name, blocks in self._lists:
            if len({*module.get_submodule(name).children()}) < blocks:
                raise bad_input(
                    wanted="blocks of their own, as a subnet has the first ones",
                    got=f"one in several places of {name}",
                    do="write a block for each place, or call one in a loop",
                    key="model.factory",
                )

    @property
    def whole(self) -> Subnet:
        """The whole network."""
        return Subnet(tuple((one.name, one.hidden) for one in self._stacks), self._lists)

    def at(self, widths: Sequence[float], depths: Sequence[float]) -> Subnet:
        """Return the subnet with these shares of the hidden features of each stack, and of the blocks of each list."""
        return Subnet(
            tuple((s.name, max(1, round(s.hidden * share))) for s, share in zip(self._stacks, widths, strict=True)),
            tuple((name, max(1, round(n * share))) for (name, n), share in zip(self._lists, depths, strict=True)),
        )

    def forward(self, subnet: Subnet, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a subnet computes. Statistics of batch norms stay as they are."""
        given: dict[str, Tensor] = dict(self._sliced(subnet))
        given |= {name: given.get(name, one).clone() for name, one in self.module.named_buffers()}
        with self._shortened(subnet):
            return functional_call(self.module, given, args, dict(kwargs))

    def extract(self, subnet: Subnet) -> nn.Module:
        """Return a module of its own: ordinary layers that hold the slices, and the blocks that are left."""
        made = copy.deepcopy(self.module)
        for name, tensor in self._sliced(subnet):
            path, _, leaf = name.rpartition(".")
            owner = made.get_submodule(path)
            held = tensor.detach().clone()
            if leaf in owner._parameters:
                setattr(owner, leaf, nn.Parameter(held))
            else:
                owner._buffers[leaf] = held
        hidden = dict(subnet.widths)
        for stack in self._stacks:
            for layer in _layers(made.get_submodule(stack.name)):
                _resize(layer, stack.hidden, hidden[stack.name])
        for name, blocks in reversed(subnet.depths):  # a list inside of a block before the list of that block
            kept = made.get_submodule(name)
            assert isinstance(kept, nn.ModuleList)
            del kept[blocks:]
        return made

    def nbytes(self, subnet: Subnet) -> int:
        """Return the bytes of the parameters of a subnet."""
        sliced = dict(self._sliced(subnet))
        gone = tuple(f"{name}.{i}." for name, n in self._lists for i in range(dict(subnet.depths)[name], n))
        return sum(
            sliced.get(name, p).nbytes for name, p in self.module.named_parameters() if not name.startswith(gone)
        )

    def _sliced(self, subnet: Subnet) -> Iterator[tuple[str, Tensor]]:
        hidden = dict(subnet.widths)
        for stack in self._stacks:
            for name, dim in stack.slices:
                tensor = _tensor(self.module, name)
                yield name, tensor.narrow(dim, 0, hidden[stack.name])

    @contextmanager
    def _shortened(self, subnet: Subnet) -> Iterator[None]:
        """Let the blocks beyond the subnet's give their input back, inside the `with` block."""
        skipped: list[nn.Module] = []
        own: list[Any] = []
        for name, blocks in subnet.depths:
            held = self.module.get_submodule(name)
            assert isinstance(held, nn.ModuleList)
            skipped += [*held[blocks:]]
        for block in skipped:
            own.append(vars(block).get("forward"))  # of a block whose forward was wrapped
            block.forward = _unchanged  # type: ignore[method-assign]
        try:
            yield
        finally:
            for block, before in zip(skipped, own, strict=True):
                del block.forward
                if before is not None:
                    block.forward = before  # type: ignore[method-assign]


@torch.no_grad()
def recalibrate(module: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
    """Set the statistics of the batch norms of `module` to those of these inputs, in place; it stays in its mode."""
    norms = [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    mode, momenta = module.training, [one.momentum for one in norms]
    for one in norms:
        one.reset_running_stats()
        one.momentum = None  # a plain average over the batches
    module.train()
    for batch in batches:
        module(**batch)
    for one, momentum in zip(norms, momenta, strict=True):
        one.momentum = momentum
    module.train(mode)


def _unchanged(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    return x


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), leaf)
    return found


def _layers(stack: nn.Module) -> list[nn.Module]:
    """Return the layers of a Sequential that have tensors."""
    return [
        one
        for one in stack.children()
        if next(one.parameters(), None) is not None or next(one.buffers(), None) is not None
    ]


def _stacks(module: nn.Module) -> Iterator[_Stack]:
    for path, one in module.named_modules():
        if type(one) is not nn.Sequential:
            continue
        named = [(name, layer) for name, layer in one.named_children() if layer in _layers(one)]
        if len(named) < 2 or not all(isinstance(layer, _WEIGHTED) for _, layer in (named[0], named[-1])):
            continue
        hidden, before = _outputs(named[0][1]), f"{path}." if path else ""
        middle = named[1:-1]
        if _inputs(named[-1][1]) != hidden or not all(
            isinstance(norm, _NORMS) and norm.num_features == hidden for _, norm in middle
        ):
            continue
        slices = [(f"{before}{named[0][0]}.{leaf}", 0) for leaf in _names(named[0][1])]
        slices += [(f"{before}{name}.{leaf}", 0) for name, layer in middle for leaf in _names(layer)]
        slices.append((f"{before}{named[-1][0]}.weight", 1))
        yield _Stack(path, hidden, tuple(slices))


def _names(layer: nn.Module) -> list[str]:
    """Return the tensors of a layer that have hidden features."""
    return [n for n, one in (*layer.named_parameters(), *layer.named_buffers()) if one.ndim]


def _outputs(layer: nn.Module) -> int:
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels if layer.groups == 1 else -1
    assert isinstance(layer, nn.Linear)
    return layer.out_features


def _inputs(layer: nn.Module) -> int:
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels if layer.groups == 1 else -2
    assert isinstance(layer, nn.Linear)
    return layer.in_features


def _resize(layer: nn.Module, before: int, hidden: int) -> None:
    """Let a layer's own account of its size be that of its tensors."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = weight.shape[:2]
    elif isinstance(layer, _NORMS):
        layer.num_features = hidden
