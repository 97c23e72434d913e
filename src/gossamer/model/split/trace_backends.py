"""How a traced forward runs its operators: for real, or on shapes alone.

Unreal: what depends on a parameter has a shape and no numbers, so it takes no memory and no time. What depends on the
batch, on buffers and on nothing else stays real: masks, positions, and the branches that Python takes on them are those
of the real forward. An operator that needs a number which is not there raises, and the forward has to run for real.
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
    """Runs operators, and names the memory that tensors lie in."""

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives."""

    def key(self, tensor: Tensor) -> int:
        """The same number for tensors in the same memory, and never given twice."""

    def refuse(self) -> None:
        """A number was asked for that is not there."""


class EagerOps:
    """Operators run as they are."""

    def __init__(self) -> None:
        # While somebody refers to a storage, even if weakly, its address names nothing else; its memory is let go.
        self._seen: dict[int, StorageWeakRef] = {}
        self._without: dict[int, Tensor] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            given = (args, kwargs)
            if not any(_is_one_element(x) for x in tree_leaves(given)):
                raise
        # A kernel that wants the strides of a real parameter, and was given one without memory: this once it has some.
        args, kwargs = tree_map_only(Tensor, lambda x: x.contiguous() if _is_one_element(x) else x, given)
        return func(*args, **kwargs)

    def refuse(self) -> None:
        """All are there."""

    def key(self, tensor: Tensor) -> int:
        """The same number for tensors in the same memory, and never given twice."""
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
    """Operators that depend on a parameter of `module` run on shapes alone. `refused`: one of them could not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.refused = False
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._same: dict[int, int] = {}  # memory of a stand-in -> of what it stands for
        self._unknown = {self.key(p) for p in module.parameters()}  # real tensors whose numbers mean nothing

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `func` gives; raises where that cannot be said."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) or self.key(x) in self._unknown for x in tensors):
            return func(*args, **kwargs)
        try:
            return self._shapes(func, args, kwargs)
        except Exception:
            self.refused = True  # whoever may catch this
            raise

    def refuse(self) -> None:
        """A number was asked for that is not there."""
        self.refused = True

    def key(self, tensor: Tensor) -> int:
        """That of the real tensor, where this lies in the memory of its stand-in."""
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
            raise RunFailed(f"a {type(real).__name__} of layout {real.layout} has more to it than a shape")
        strides = real.stride() if not _is_one_element(real) else torch.empty(real.shape, device="meta").stride()
        with self._mode:
            stand_in = torch.empty_strided(real.shape, strides, dtype=real.dtype, device=real.device)
        self._same[super().key(stand_in)] = self.key(real)
        return stand_in


@contextmanager
def unlogged() -> Iterator[None]:
    """An operator whose shapes cannot be told is no error of the run, though torch logs it as one."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_no)
    try:
        yield
    finally:
        log.removeFilter(_no)


def _no(_: logging.LogRecord) -> bool:
    return False


def like_bf16(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """torch 2.13 says what grouped products give in bf16 alone, and runs others too; to be removed when it does."""
    given = (args, {**kwargs, "out_dtype": None})
    halves, named = tree_map_only(Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, given)
    return func(*halves, **named).to(kwargs.get("out_dtype") or args[0].dtype)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator says it changes in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))


def changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """What an operator changes; of a normalisation, which need not say so, everything where it trains."""
    if "batch_norm" not in func.name():
        yield from written(func, args, kwargs)
        return
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("training", given.get("train", True)):
        yield from (x for x in (given.get("running_mean"), given.get("running_var")) if isinstance(x, Tensor))


def _is_one_element(tensor: Any) -> bool:
    """As the parameters of a `MetaModel` are, in all of their dims."""
    return isinstance(tensor, Tensor) and tensor.numel() > 1 and not any(tensor.stride())
