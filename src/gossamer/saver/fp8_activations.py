"""Fp8Activations: the inputs that layers keep for their backward pass are held in 8 bits.

Equations (x the input of a layer, group g of 16 neighbors in its last dimension):
    s_g = max|x_g| / 448;   q = e4m3(x / s_g);   backward uses s_g q in place of x
Kept:   1.25 bytes per number in place of 4 (2 of bfloat16).   Cost: a pass over x in forward, and one in backward.
Paper:  Xi et al., COAT, ICLR 2025, arXiv:2410.19313, section 5 (groups of 1 x 16 for inputs of non-linear layers).
Lossy:  an element of an input is off by up to 2^-4 of itself, a gradient, which sums many, by much less. What forward
computes is exact. Parameters, attention, dropout masks and losses are never coded.
Unlike the paper: one rule for the inputs of all layers, linear ones too; products stay in the precision of the run.
Good when: layers are modules, and activations are most of the memory.   Not for: models whose layers are functions
called in a forward: what these keep is left alone. With recompute a unit keeps its arguments alone, so this is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.saver import Installed, Saver, Site
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import positive

_KEY = "plan.savers"
_GROUP, _TOP = 16, 448.0
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Activations(Saver):
    """Layers' inputs kept in FP8; `least`: inputs with fewer numbers stay as they are."""

    is_exact: ClassVar[bool] = False
    with_sharded_parameters: ClassVar[bool] = True
    excludes: ClassVar[tuple[str, ...]] = ("recompute",)

    least: int = 4096

    def __post_init__(self) -> None:
        positive("least", self.least)

    def install(self, module: nn.Module, site: Site) -> Installed:
        layers = [one for one in module.modules() if _is_layer(one)]
        if not layers:
            raise bad_input(
                wanted="a model with layers as modules, whose inputs can be kept in 8 bits",
                got=f"{type(module).__name__} without any",
                do="leave fp8_activations out",
                key=_KEY,
            )
        if any(getattr(one, "_compiled_call_impl", None) is not None for one in module.modules()):
            raise bad_input(
                wanted="a model that is not compiled, whose layers are called one by one",
                got="model.compile true",
                do="set model.compile to false, or leave fp8_activations out",
                key=_KEY,
            )
        shared: _Shared = {}
        ends = [_wrapped(one, self.least, shared) for one in layers if _is_here(one)]

        def remove() -> None:
            for end in ends:
                end()

        return Installed(remove=remove, objective=site.objective)


@dataclass(frozen=True, slots=True, eq=False)
class _Coded:
    """A tensor in E4M3 with a scale per group."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def of(x: Tensor) -> _Coded:
        groups = x.detach().reshape(-1, _GROUP).float()
        scales = groups.abs().amax(-1, keepdim=True).div_(_TOP)
        codes = groups / torch.where(scales == 0, 1.0, scales)
        return _Coded(codes.to(torch.float8_e4m3fn), scales)

    def numbers(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return what is kept, as a tensor of a shape and type."""
        return (self.codes.float() * self.scales).to(dtype).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a layer keeps in place of a tensor: the code of its input, and the shape and type of the tensor."""

    coded: _Coded
    shape: torch.Size
    dtype: torch.dtype


# What is coded of a tensor that several layers are called with, while it is alive: by id, with its version.
_Shared = dict[int, tuple["weakref.ref[Tensor]", int, _Coded]]


def _is_layer(module: nn.Module) -> bool:
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not any(module.children()) and not isinstance(module, nn.Embedding)


def _is_here(layer: nn.Module) -> bool:
    """Return whether this rank runs the layer: its parameters are none of another stage's."""
    return not any(isinstance(one, AbsentTensor) for one in layer.parameters())


def _wrapped(layer: nn.Module, least: int, shared: _Shared) -> Callable[[], None]:
    """Have a layer keep its inputs in 8 bits, in training; return what undoes it."""
    plain, was_own = layer.forward, "forward" in vars(layer)
    is_linear = isinstance(layer, nn.Linear)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and _can_be_coded(one, least)]

        def pack(kept: Tensor) -> Tensor | _Kept:
            found = next((one for one in given if _is_of(kept, one, is_linear)), None)
            return kept if found is None else _Kept(_coded(found, shared), kept.shape, kept.dtype)

        with saved_tensors_hooks(pack, _unpacked):
            try:
                return plain(*args, **kwargs)
            finally:
                given.clear()  # what is kept holds `pack`, which would hold the inputs

    layer.forward = forward  # type: ignore[method-assign]

    def end() -> None:
        if was_own:
            layer.forward = plain  # type: ignore[method-assign]
        else:
            del layer.forward

    return end


def _can_be_coded(x: Tensor, least: int) -> bool:
    is_activation = not isinstance(x, nn.Parameter | AbsentTensor) and x.dtype in _WIDE
    return is_activation and x.is_contiguous() and x.numel() >= least and x.shape[-1] % _GROUP == 0


def _is_of(kept: Tensor, x: Tensor, is_linear: bool) -> bool:
    """Return whether a kept tensor is all of the input x, or its copy in the type of the product (autocast)."""
    if kept.numel() != x.numel() or not kept.is_contiguous() or isinstance(kept, nn.Parameter):
        return False
    if kept.untyped_storage()._cdata == x.untyped_storage()._cdata:
        return True
    is_copy = is_linear and kept.dtype in _WIDE and kept.dtype != x.dtype
    return is_copy and kept.shape[-1] == x.shape[-1] and kept.shape != x.shape[-1:]


def _coded(x: Tensor, shared: _Shared) -> _Coded:
    known = shared.get(id(x))
    if known is not None and known[0]() is x and known[1] == x._version:
        return known[2]
    made, key = _Coded.of(x), id(x)
    shared[key] = (weakref.ref(x, lambda _: shared.pop(key, None)), x._version, made)
    return made


def _unpacked(kept: Tensor | _Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.coded.numbers(kept.shape, kept.dtype)
