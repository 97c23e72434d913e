"""State that a constructor leaves besides parameters and buffers: tensors that share memory, and tensors computed once.

Both equal those of a single-process run if one stage has all of them. BadInput names them if stages would diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.split_error import SplitArguments, split_error
from gossamer.ops.fingerprint import digest
from gossamer.spec.errors import bad_input

_UNREAD = {  # attributes and methods that read no values
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "grad_fn", "is_meta"),
    *("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__hash__", "__repr__"),
}
_PIECE = 1 << 16  # elements whose hashes are in memory at a time
TensorPlace = tuple[str, str]  # path of a module, name of an attribute


@dataclass(frozen=True, slots=True)
class ConstructorState:
    """A record of how a model's tensors were built.

    `reason`: why its constructor had to run with real parameters; "" if it is built without memory.
    """

    reason: str = ""
    shared: tuple[frozenset[str], ...] = ()  # different parameters and buffers in one memory
    computed: tuple[TensorPlace, ...] = ()  # derived tensors: computed from parameters, or in their memory

    @staticmethod
    def of(module: nn.Module, reason: str) -> ConstructorState:
        """Return the record of a module whose parameters have memory."""
        return ConstructorState(reason, shared_memory(module), tuple(_computed(module)))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each once, by its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def digests_of(module: nn.Module, names: frozenset[str] | None = None) -> dict[str, int]:
    """Return a 48-bit hash of the values of each parameter and buffer, or of those in `names`; equal if all bits are.

    Tensors on the meta device and those that are not strided have none.
    """
    found = {}
    for name, tensor in tensors_of(module).items():
        if (names is None or name in names) and tensor.layout is torch.strided and not tensor.is_meta:
            plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            pieces = plain.detach().reshape(-1).split(_PIECE)  # type: ignore[no-untyped-call]
            found[name] = (digest(pieces, 0) ^ plain.numel()) % 2**48
    return found


def check_held(module: nn.Module, names: frozenset[str]) -> None:
    """Raise BadInput unless all buffers and the parameters in `names` have data.

    These parameters also need memory of their own.
    """
    for name, tensor in tensors_of(module).items():
        is_parameter = isinstance(tensor, nn.Parameter)
        if isinstance(tensor, FakeTensor) or (is_parameter and name in names and not has_memory(tensor)):
            raise bad_input(
                wanted=f"a constructor that gives {name} memory for every element",
                got=f"{_kind(tensor)} of shape {tuple(tensor.shape)}",
                do=f"give {name} memory in the constructor (contiguous(), clone())",
                key="model",
            )


def has_memory(tensor: Tensor) -> bool:
    """Return whether every element of a tensor has memory of its own: it is neither on the meta device nor expanded."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    repeats = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return not (tensor.is_meta or repeats)


def check_twice(before: dict[str, int], again: dict[str, int]) -> None:
    """Raise BadInput if a constructor gave other values the second time. `before`, `again`: digests by tensor name."""
    for name in before.keys() & again.keys():
        if before[name] != again[name]:
            raise bad_input(
                wanted="a constructor that gives the same numbers every time it runs",
                got=f"different numbers for {name}" if name else "other operators in another run",
                do="draw from the generators of torch, random or numpy.random, which train.seed seeds, and from none "
                "that the clock or the system seeds",
                key="model",
            )


def shared_memory(module: nn.Module) -> tuple[frozenset[str], ...]:
    """Return groups of parameters and buffers whose memory overlaps."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors_of(module).items():
        if tensor.numel() and (key := _memory(tensor)):
            by_storage.setdefault(key, []).append((*_span(tensor), name))
    return tuple(group for spans in by_storage.values() for group in _overlapping(sorted(spans)))


class Readers(TorchFunctionMode):
    """A mode that records which derived tensors (computed from parameters by the constructor) a forward reads."""

    def __init__(self, module: nn.Module, places: Sequence[TensorPlace]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []  # so that no id is given twice
        for path, attribute in places:
            inner = module.get_submodule(path)
            held = inner._buffers[attribute] if attribute in inner._buffers else vars(inner).get(attribute)
            for tensor in (x for x in tree_leaves(held) if isinstance(x, Tensor)):
                self._names[id(tensor)] = f"{path}.{attribute}" if path else attribute
                self._held.append(tensor)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` with its reads recorded: the forward alone, as the code that traces it reads every tensor."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        return watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = getattr(getattr(func, "__self__", None), "__name__", getattr(func, "__name__", ""))
        if self._names and asked not in _UNREAD:
            self.found.update(self._names[id(x)] for x in tree_leaves((args, kwargs)) if id(x) in self._names)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Raise BadInput if a derived tensor was read: its stage may not hold the parameters it was computed from."""
        for name in sorted(self.found):
            raise split_error(
                wanted="a forward that reads no tensor which the constructor computed from parameters",
                got=f"{name}, which the constructor computed from a parameter, or put into the memory of one",
                do=partial(_in_forward, name),
            )


@dataclass
class _MemoryGroup:
    end: int
    names: set[str] = field(default_factory=set)


def _overlapping(spans: Sequence[tuple[int, int, str]]) -> Iterator[frozenset[str]]:
    groups: list[_MemoryGroup] = []
    for start, end, name in spans:
        if not groups or start >= groups[-1].end:
            groups.append(_MemoryGroup(end))
        groups[-1].names.add(name)
        groups[-1].end = max(groups[-1].end, end)
    yield from (frozenset(group.names) for group in groups if len(group.names) > 1)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    last: int = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _computed(module: nn.Module) -> Iterator[TensorPlace]:
    named = tensors_of(module)
    ids = {id(x) for x in named.values()} | {id(x) for x in module.parameters()}
    memory = {_memory(x) for x in named.values()} - {0}
    for path, inner in module.named_modules():
        for name, held in [*vars(inner).items(), *inner._buffers.items()]:
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for x in tree_leaves(held):
                is_buffer = isinstance(x, Tensor) and id(x) in ids
                if isinstance(x, Tensor) and (x.grad_fn is not None or (not is_buffer and _memory(x) in memory)):
                    yield path, name
                    break


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return "a tensor without memory"
    return "one number, repeated (an expanded tensor)"


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _in_forward(name: str, say: SplitArguments) -> str:
    return f"compute {name} in forward, or {say.whole}"
