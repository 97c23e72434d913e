"""Experts found by structure: matrices of all experts in one parameter, or a list of modules beside a router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gossamer.model.quantized_linear import is_conv1d
from gossamer.spec.errors import BadInput, bad_input

_UP, _GATE_UP, _DOWN = "up_proj", "gate_up_proj", "down_proj"


@dataclass(frozen=True, slots=True, eq=False)
class FusedExperts:
    """A module of transformers that holds the matrices of its experts in two parameters (experts, ., .).

    It is called with hidden states, the numbers of each token's experts, and their weights; `has_gate`, `has_bias` and
    `is_transposed` are how transformers describes the two parameters.
    """

    path: str
    module: Any

    @property
    def parameters(self) -> tuple[str, str]:
        """Return the names of the first and the last matrix of an expert."""
        return (_GATE_UP if self.module.has_gate else _UP, _DOWN)


@dataclass(frozen=True, slots=True, eq=False)
class ListedExperts:
    """A list of experts in a block: `path` of the list, `block` the module that routes tokens to its members."""

    path: str
    block: nn.Module
    experts: tuple[nn.Module, ...]


def fused_experts(module: nn.Module) -> Iterator[FusedExperts]:
    """Yield the fused experts in `module` that can be observed: those behind transformers' interface for experts."""
    for path, inner in module.named_modules():
        if is_fused(inner) and _is_described(inner):
            yield FusedExperts(path, inner)


def is_fused(module: nn.Module) -> bool:
    """Return whether a module holds a parameter with three dimensions, as matrices of several experts.

    Those of torch's own layers are none: kernels of convolutions, a bilinear form.
    """
    if type(module).__module__.startswith("torch.nn."):
        return False
    return any(one is not None and one.dim() == 3 and len(one) > 1 for one in module._parameters.values())


def _is_described(module: nn.Module) -> bool:
    """Return whether transformers says how the matrices of a module's experts are held."""
    if not type(module).__module__.startswith("transformers."):
        return False
    inside: Any = module
    given = all(hasattr(inside, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    return given and {_GATE_UP if inside.has_gate else _UP, _DOWN} <= inside._parameters.keys()


def listed_experts(module: nn.Module) -> Iterator[ListedExperts]:
    """Yield the lists of two or more alike modules with linear layers that stand beside a router.

    A router is a linear layer of the block that holds the list (or alone in one of its children), with an output per
    expert.
    """
    for path, block in module.named_modules():
        for name, inner in block.named_children():
            if not isinstance(inner, nn.ModuleList | nn.ModuleDict):
                continue
            members = tuple(inner.children())
            if (
                len(members) > 1
                and _are_alike(members)
                and any(_outputs(one) == len(members) for one in _near(block, inner))
            ):
                yield ListedExperts(f"{path}.{name}" if path else name, block, members)


def routers(module: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers that choose or weigh experts, with why they are one."""
    found: dict[nn.Module, str] = {}
    blocks = [(one.block, len(one.experts), list_of(one)) for one in listed_experts(module)]
    for fused in fused_experts(module):
        parent = module.get_submodule(fused.path.rpartition(".")[0])
        blocks.append((parent, len(getattr(fused.module, _DOWN)), fused.module))
    for block, count, experts in blocks:
        for linear in _near(block, experts):
            if _outputs(linear) in (1, count):
                found[linear] = "a router"
    return found


def list_of(listed: ListedExperts) -> nn.Module:
    """Return the list that holds the experts."""
    return listed.block.get_submodule(listed.path.rpartition(".")[2])


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that is called: nn.Linear, a subclass, or transformers' Conv1D."""
    is_read = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)  # MultiheadAttention's
    return (isinstance(module, nn.Linear) and not is_read) or is_conv1d(module)


def _are_alike(members: tuple[nn.Module, ...]) -> bool:
    shapes = [tuple((name, one.shape) for name, one in member.named_parameters()) for member in members]
    return all(one == shapes[0] for one in shapes) and any(is_linear(one) for one in members[0].modules())


def _near(block: nn.Module, without: nn.Module) -> Iterator[nn.Module]:
    """Yield linear layers that are children of a block, or the only one in a child; not those in `without`."""
    for child in block.children():
        if child is not without:
            inside = [one for one in child.modules() if is_linear(one)]
            yield from inside if len(inside) == 1 else ()


def _outputs(linear: nn.Module) -> int:
    found: Any = linear
    return int(found.nf if is_conv1d(linear) else found.out_features)


def routed(at: FusedExperts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (tokens, in), numbers of experts and weights (tokens, k) of a call."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    given = dict(zip(names, args, strict=False)) | {name: one for name, one in kwargs.items() if name in names}
    if set(given) != set(names) or not all(isinstance(one, Tensor) for one in given.values()):
        raise unlike(at.path, at.module, "it is not called with tokens, numbers of experts and weights")
    hidden, chosen, weights = (given[name] for name in names)
    if chosen.dim() != 2 or chosen.shape != weights.shape or hidden.dim() != 2:
        raise unlike(at.path, at.module, "its tokens, numbers of experts and weights do not belong together")
    return hidden, chosen, weights


def inner_activation(at: FusedExperts, number: int, x: Tensor) -> Tensor:
    """Return what the last matrix of an expert sees of tokens x (n, in)."""
    product = _product(at.module, at.parameters[0], number, x)
    found: Tensor = at.module._apply_gate(product) if at.module.has_gate else at.module.act_fn(product)
    return found


def last_product(at: FusedExperts, number: int, inner: Tensor) -> Tensor:
    """Return the output of an expert of its inner activation, before the router's weight."""
    found = _product(at.module, at.parameters[1], number, inner)
    return at.module.post_expert_norm(found) if getattr(at.module, "has_post_expert_norm", False) else found


def expert_output(at: FusedExperts, number: int, x: Tensor) -> Tensor:
    """Return the output of one expert for tokens x (n, in), before the router's weight."""
    return last_product(at, number, inner_activation(at, number, x))


def _product(module: Any, name: str, number: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[number]
    bias = getattr(module, f"{name}_bias")[number] if module.has_bias else None
    return nn.functional.linear(x, weight.t() if module.is_transposed else weight, bias)


def unlike(path: str, module: nn.Module, why: str) -> BadInput:
    """Return the error for experts that cannot be observed."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return bad_input(
        wanted=f"experts in {path} whose inputs and router weights can be observed",
        got=f"a {kind}: {why}",
        do="exclude them, or prune by magnitude",
        key="exclude",
    )
