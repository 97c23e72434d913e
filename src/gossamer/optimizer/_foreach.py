"""Lists of tensors for torch's fused kernels, out of mappings by name: one group per device, type and extra key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lists:
    """The tensors of one kernel call; `slots[i]` lists slot i of every parameter. All contiguous and of one type."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    slots: tuple[list[Tensor], ...] = ()


def zeros(params: Mapping[str, Tensor], slots: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return zeros of each parameter's shape, type and device, per slot."""
    return {
        name: {slot: torch.zeros_like(p, memory_format=torch.contiguous_format).detach() for slot in slots}
        for name, p in params.items()
    }


def chosen(some: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of `tensors` whose names are in `some`, in its order."""
    return {name: tensors[name] for name in some if name in tensors}


def lists(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: Mapping[str, Mapping[str, Tensor]],
    slots: Sequence[str],
    *,
    apart: Callable[[Tensor], bool] = lambda _: False,
) -> Iterator[tuple[bool, Lists]]:
    """Yield (apart(param), tensors) for each group of parameters that have a gradient.

    The kernels walk memory and ignore strides. So a non-contiguous tensor is passed as a copy, which is written back
    when the group has been consumed; contiguous parameters and slots are changed in place.
    """
    groups: dict[tuple[torch.device, torch.dtype, bool], Lists] = {}
    copies: list[tuple[Tensor, Tensor]] = []
    for name, grad in grads.items():
        param = params[name].detach()
        key = (param.device, param.dtype, apart(param))
        group = groups.setdefault(key, Lists(slots=tuple([] for _ in slots)))
        group.params.append(_dense(param, copies))
        group.grads.append(grad.detach().to(param.dtype).contiguous())
        for column, slot in zip(group.slots, slots, strict=True):
            column.append(_dense(state[name][slot], copies))
    for (_, _, is_apart), group in groups.items():
        yield is_apart, group
    for original, copy in copies:
        original.copy_(copy)


def _dense(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    copy = tensor.contiguous()
    copies.append((tensor, copy))
    return copy
