"""Backends that run the operators of a traced forward: on real tensors, or on shapes alone.

On shapes alone, a tensor that depends on a parameter has no data, so it takes no memory and no time. A tensor that
depends on nothing but the batch and buffers stays real: masks, positions, and the branches that Python takes on them
are those of the real forward. An operator that needs a missing value raises, and the forward has to run on real
tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from gossamer.spec.errors import RunFailed

GROUPED = torch.ops.aten._grouped_mm.default


class TraceBackend(Protocol):
    """A backend that runs operators, and numbers the memory that tensors lie in."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func` and return its output."""

    def key(self, tensor: Tensor) -> int:
        """Return a number that is equal for tensors in the same memory, and never used for other memory."""

    def refuse(self) -> None:
        """Record that a value was read that a fake tensor does not have."""


class EagerOps:
    """A backend that runs operators on real tensors."""

    def __init__(self) -> None:
        # While a storage is referenced, even weakly, its address is not reused; its memory is freed.
        self._seen: dict[int, StorageWeakRef] = {}
        self._without: dict[int, Tensor] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func` and return its output."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            given = (args, kwargs)
            if not any(_is_one_element(x) for x in tree_leaves(given)):
                raise
        # The kernel needs the strides of a real parameter, and this one has no memory: allocate it for this call.
        args, kwargs = tree_map_only(Tensor, lambda x: x.contiguous() if _is_one_element(x) else x, given)
        return func(*args, **kwargs)

    def refuse(self) -> None:
        """Do nothing: no value is missing."""

    def key(self, tensor: Tensor) -> int:
        """Return a number that is equal for tensors in the same memory, and never used for other memory."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # tensors without storage
            self._without[id(tensor)] = tensor
            return -id(tensor)
        address = int(storage._cdata)
        if address not in self._seen:
            self._seen[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return address


class FakeTensorOps(EagerOps):
    """A backend that runs operators on fake tensors if they depend on a parameter of `module`.

    `refused`: one of them could not run so.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.refused = False
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._same: dict[int, int] = {}  # memory of a fake copy -> of its real tensor
        self._unknown = {self.key(p) for p in module.parameters()}  # real tensors whose values mean nothing

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run `func` and return its output; raise if shapes alone do not determine it."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) or self.key(x) in self._unknown for x in tensors):
            return func(*args, **kwargs)
        try:
            return self._shapes(func, args, kwargs)
        except Exception:
            self.refused = True  # even if the model's code catches this
            raise

    def refuse(self) -> None:
        """Record that a value was read that a fake tensor does not have."""
        self.refused = True

    def key(self, tensor: Tensor) -> int:
        """Return the number of the real tensor, if `tensor` lies in the memory of its fake copy."""
        key = super().key(tensor)
        return self._same.get(key, key)

    def _shapes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        stands: dict[int, Tensor] = {}

        def fake(x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                return x
            stand_in = self._stand_in(x)
            stands[id(stand_in)] = x
            return stand_in

        for x in written(func, args, kwargs):
            if not isinstance(x, FakeTensor):
                self._unknown.add(self.key(x))
                if torch.Tag.inplace_view in func.tags:
                    raise RunFailed("a real tensor would get another shape")
        fakes, named = tree_map_only(Tensor, fake, (tuple(args), dict(kwargs)))
        with self._mode:
            out = like_bf16(func, fakes, named) if func is GROUPED else func(*fakes, **named)
        return tree_map_only(Tensor, lambda x: stands.get(id(x), x), out)

    def _stand_in(self, real: Tensor) -> Tensor:
        if real.layout is not torch.strided or type(real) not in (Tensor, nn.Parameter):
            raise RunFailed(f"no fake copy of a {type(real).__name__} of layout {real.layout}: trace with real tensors")
        strides = real.stride() if not _is_one_element(real) else torch.empty(real.shape, device="meta").stride()
        with self._mode:
            stand_in = torch.empty_strided(real.shape, strides, dtype=real.dtype, device=real.device)
        self._same[super().key(stand_in)] = self.key(real)
        return stand_in


@contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's log of operators whose output shapes are unknown: the run goes on without them."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_no)
    try:
        yield
    finally:
        log.removeFilter(_no)


def _no(_: logging.LogRecord) -> bool:
    return False


def like_bf16(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a grouped matmul on fake tensors as if in bfloat16, and return the type it has.

    torch 2.13 infers the output of grouped matmuls in bfloat16 alone, and runs others too. To be removed when it does.
    """
    given = (args, {**kwargs, "out_dtype": None})
    halves, named = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, given)
    return func(*halves, **named).to(kwargs.get("out_dtype") or args[0].dtype)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator says it changes in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


def changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator changes.

    For a batch norm in training these are its running statistics, which its schema need not name.
    """
    if "batch_norm" not in func.name():
        yield from written(func, args, kwargs)
        return
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("training", given.get("train", True)):
        yield from (x for x in (given.get("running_mean"), given.get("running_var")) if isinstance(x, Tensor))


def _is_one_element(tensor: Any) -> bool:
    """Return whether a tensor repeats one element in all of its dims, as the parameters of a `MetaModel` do."""
    return isinstance(tensor, Tensor) and tensor.numel() > 1 and not any(tensor.stride())
