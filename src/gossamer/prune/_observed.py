"""What reaches each matrix of a model on a calibration text: sums of squares, added batch by batch.

An ordinary linear layer is observed where it is called. Fused experts of transformers are called with the tokens, their
experts and the router's weights: their inner activations are computed again here, and the first output that follows
from them is compared with the module's own, so that a module which computes otherwise is refused. In a list of experts
the router's weight of a token is the derivative of the block's output by the expert's: a block that does not multiply
an expert's output by one number per token is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.model.layer_input import layer_input
from gossamer.prune._experts import (
    FusedExperts,
    ListedExperts,
    inner_activation,
    is_linear,
    last_product,
    routed,
    unlike,
)
from gossamer.prune._matrices import Found

_CLOSE = {torch.bfloat16: 5e-2, torch.float16: 5e-3}  # relative difference of one output computed in two orders
_CLOSE_ELSE = 1e-4
_CONSTANT = 1e-4  # relative difference of the derivatives of one token's features


@dataclass(slots=True, eq=False)
class InputStatistics:
    """What reached one matrix: `squares` (in,) in float64, the sum over tokens of (g x_j)^2; `tokens`: their number.

    g is the router's weight where the pruning weighs by it, else 1.
    """

    squares: Tensor
    tokens: int = 0

    @property
    def norms(self) -> Tensor:
        """Return ||x_j g||_2 of each input feature."""
        return self.squares.sqrt()

    def add(self, x: Tensor, gates: Tensor | None) -> None:
        """Add tokens: x (..., in), gates (...) of the same leading shape, or None for 1."""
        rows = x.detach().reshape(-1, x.shape[-1]).double()
        if gates is not None:
            given = gates.detach().reshape(-1, 1).double()
            rows = rows * given
            self.tokens += int((given != 0).sum())
        else:
            self.tokens += len(rows)
        self.squares += rows.square().sum(0).to(self.squares.device)


def weighed(weight: Tensor, seen: InputStatistics | None) -> Tensor:
    """Return |W_ij| ||x_j g||_2 of a weight (out, in), in float64; |W_ij| where nothing reached the layer."""
    found = weight.double().abs()
    return found if seen is None else found * seen.norms


@contextmanager
def observing(found: Found, *, weighs_by_gate: bool) -> Iterator[dict[str, InputStatistics]]:
    """Collect the statistics of all matrices in `found` inside this context, by name of the matrix."""
    seen = {
        one.name: InputStatistics(torch.zeros(one.weight.shape[1], dtype=torch.float64, device=one.weight.device))
        for one in found.matrices
    }
    with ExitStack() as stack, torch.no_grad():
        inside: set[nn.Module] = set()
        for listed in found.listed if weighs_by_gate else ():
            watch = _ListWatch(listed, {id(one): seen[path] for path, one in found.linears.items() if path in seen})
            inside |= watch.linears()
            watch.install(stack)
        for path, linear in found.linears.items():
            if linear not in inside and path in seen:
                _hook(stack, linear.register_forward_pre_hook(partial(_add, seen[path]), with_kwargs=True))
        for fused in found.fused:
            watch_fused = _FusedWatch(fused, seen, weighs_by_gate)
            _hook(stack, fused.module.register_forward_hook(watch_fused.after, with_kwargs=True))
        yield seen


def _hook(stack: ExitStack, handle: Any) -> None:
    stack.callback(handle.remove)


def _add(seen: InputStatistics, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen.add(layer_input(args, kwargs), None)


@dataclass(slots=True, eq=False)
class _FusedWatch:
    """Observes one module of fused experts."""

    at: FusedExperts
    seen: dict[str, InputStatistics]
    weighs_by_gate: bool
    is_proven: bool = False

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """Add what reached the experts in one call."""
        hidden, chosen, weights = routed(self.at, args, kwargs)
        again = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        first, last = self.at.parameters
        prefix = f"{self.at.path}." if self.at.path else ""
        for number in range(len(getattr(module, last))):
            tokens, places = torch.where(chosen == number)
            if not len(tokens):
                continue
            x, gate = hidden[tokens], weights[tokens, places]
            inner = inner_activation(self.at, number, x)
            for name, reached in ((first, x), (last, inner)):
                if (one := self.seen.get(f"{prefix}{name}[{number}]")) is not None:
                    one.add(reached, gate if self.weighs_by_gate else None)
            if not self.is_proven:
                y = last_product(self.at, number, inner)
                again.index_add_(0, tokens, (y * gate[:, None]).float())
        if not self.is_proven:
            self._prove(again, output)

    def _prove(self, again: Tensor, output: Tensor) -> None:
        """Raise BadInput unless the output that was computed again is the module's own."""
        own = output.reshape(again.shape).float() if isinstance(output, Tensor) else None
        bound = _CLOSE.get(output.dtype, _CLOSE_ELSE) if own is not None else 0.0
        if own is None or float((again - own).abs().max()) > bound * float(own.abs().max()) + 1e-12:
            raise unlike(self.at.path, self.at.module, "its output is not that of its matrices, activation and weights")
        self.is_proven = True


@dataclass(slots=True, eq=False)
class _Call:
    """One call of an expert: what reached its linear layers, and its output, as a leaf of the block's graph."""

    reached: list[tuple[InputStatistics, Tensor]] = field(default_factory=list)
    leaf: Tensor | None = None


@dataclass(slots=True, eq=False)
class _ListWatch:
    """Observes the experts in one list, with the weights of the block's router.

    Inside of the block the graph from the experts' outputs to the block's output is kept; no other.
    """

    at: ListedExperts
    of: dict[int, InputStatistics]  # by id of a linear layer
    calls: list[_Call] = field(default_factory=list)
    open: list[_Call] = field(default_factory=list)

    def linears(self) -> set[nn.Module]:
        """Return the linear layers inside of the experts."""
        return {one for expert in self.at.experts for one in expert.modules() if is_linear(one) and id(one) in self.of}

    def install(self, stack: ExitStack) -> None:
        """Set the hooks; `stack` removes them."""
        _hook(stack, self.at.block.register_forward_pre_hook(self._begin))
        _hook(stack, self.at.block.register_forward_hook(self._end))
        for expert in self.at.experts:
            _hook(stack, expert.register_forward_pre_hook(self._enter))
            for linear in expert.modules():
                if is_linear(linear) and id(linear) in self.of:
                    _hook(stack, linear.register_forward_pre_hook(self._meet, with_kwargs=True))
            _hook(stack, expert.register_forward_hook(self._leave))

    def _begin(self, block: nn.Module, args: Any) -> None:
        self.calls.clear()
        torch.set_grad_enabled(True)

    def _enter(self, expert: nn.Module, args: Any) -> None:
        torch.set_grad_enabled(False)
        self.open.append(_Call())

    def _meet(self, linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A copy: what follows may write to it in place.
        self.open[-1].reached.append((self.of[id(linear)], layer_input(args, kwargs).detach().clone()))

    def _leave(self, expert: nn.Module, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor):
            raise unlike(self.at.path, expert, "it returns more than one tensor")
        call = self.open.pop()
        call.leaf = output.detach().requires_grad_(True)
        self.calls.append(call)
        torch.set_grad_enabled(True)
        return call.leaf.clone()  # may be written to in place, as a leaf may not

    def _end(self, block: nn.Module, args: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        calls = [(call, call.leaf) for call in self.calls if call.leaf is not None]
        leaves = [leaf for _, leaf in calls]
        if leaves and isinstance(tensor, Tensor) and tensor.requires_grad:
            slopes: Any = torch.autograd.grad(tensor.sum(), leaves, allow_unused=True)
        else:
            slopes = [None] * len(leaves)
        torch.set_grad_enabled(False)
        for (call, leaf), slope in zip(calls, slopes, strict=True):
            gates = self._gates(leaf, slope)
            for seen, x in call.reached:
                if x.shape[:-1].numel() != gates.numel():
                    raise unlike(self.at.path, block, "a linear layer in an expert sees other rows than it returns")
                seen.add(x, gates)
        self.calls.clear()
        return _detached(output)

    def _gates(self, leaf: Tensor, slope: Tensor | None) -> Tensor:
        """Return the router's weight of each token: by how much the block's output follows the expert's."""
        if slope is None:  # the output of the expert is not used
            return torch.zeros(leaf.shape[:-1], dtype=leaf.dtype, device=leaf.device)
        first = slope[..., :1]
        if slope.numel() and float((slope - first).abs().max()) > _CONSTANT * float(slope.abs().max()) + 1e-12:
            said = "it does not multiply an expert's output by one weight per token"
            raise unlike(self.at.path, self.at.block, said)
        return first.squeeze(-1)


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, tuple) and type(output) is tuple:
        return tuple(one.detach() if isinstance(one, Tensor) else one for one in output)
    return output
