"""Value reads: the moments at which Python reads values of tensors, or shapes that depend on them.

A unit whose Python outputs depend on tensor values runs on real tensors on its own stage, which records its value
reads. They are sent to the later stages in the message of the stage boundary. The shadow run of the unit there, on
absent tensors, gets them in the same order. So it takes the same branches, and returns and keeps the same values. They
are JSON in a message of fixed size: it decodes to numbers, lists and names of types alone.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.dataflow import TOLD_BYTES
from gossamer.model.split.output_leaf import OutputLeaf, PythonLeaf
from gossamer.model.split.split_error import split_error
from gossamer.spec.errors import WireMismatch

_TAKES_ALL = {Tensor.numpy: "numpy", Tensor.__array__: "numpy", Tensor.tolist: "list"}
_SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)
_HEAD = 4  # bytes of the length field in front
_REPORT = "internal error, please report"


def takes_number(func: Any) -> bool:
    """Return whether an operator gives Python a tensor value."""
    return func in _SCALARS or (isinstance(func, OpOverload) and torch.Tag.data_dependent_output in func.tags)


def takes_shape(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator gives a tensor whose shape depends on values."""
    if not isinstance(func, OpOverload) or torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return True


def looked_at(func: Any, args: Sequence[Any]) -> list[Tensor] | None:
    """Return the tensors of which Python reads values through an operator; None if it reads none."""
    if takes_number(func):
        return [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if not takes_shape(func, args):
        return None
    if func is torch.ops.aten.index.Tensor:
        return [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
    given = [x for x in args if isinstance(x, Tensor)]
    return given[1:2] if func is torch.ops.aten.masked_select.default else given[:1]


_NODE: Any = vars(torch._C.TensorBase)["grad_fn"].__get__


class ReadMode(TorchFunctionMode):
    """A mode that reports reads of tensors.

    `look` is called with every tensor that Python converts as a whole (numpy, list). `hold` is called with every tensor
    whose `grad_fn` is taken by code outside of torch.
    """

    def __init__(self, look: Callable[[Tensor], None], hold: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.look, self.hold = look, hold

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKES_ALL:
            self.look(args[0])
        elif func == _NODE and not _caller().startswith("torch."):
            self.hold(args[0])
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the module name of the calling code, skipping our own modes."""
    frame = sys._getframe(2)
    while (name := str(frame.f_globals.get("__name__", ""))).startswith("gossamer.") and frame.f_back is not None:
        frame = frame.f_back
    return name


@dataclass
class ValueReads:
    """A queue of recorded reads of tensor values, in order."""

    seen: deque[Any] = field(default_factory=deque)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record all value reads in this context."""
        with _Operators(self._note), _Methods(self._note):
            yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Answer the value reads in this context with the recorded values."""
        with _Operators(self._tell), _Methods(self._tell):
            yield

    @staticmethod
    def of_kinds(leaves: Sequence[Any], traced: Sequence[OutputLeaf]) -> ValueReads:
        """Record which outputs of a call are tensors or None, where that differs from the trace."""
        kinds: list[Any] = []
        for place, (leaf, came) in enumerate(zip(traced, leaves, strict=True)):
            was = not isinstance(leaf, PythonLeaf)
            if isinstance(came, Tensor) and not was:
                kinds.append([place, [list(came.shape), str(came.dtype).removeprefix("torch.")]])
            elif not isinstance(came, Tensor) and was:
                kinds.append([place, None])
        return ValueReads(deque(kinds))

    def kinds(self) -> dict[int, tuple[tuple[int, ...], torch.dtype] | None]:
        """Return the outputs that `of_kinds` recorded, by place: shape and dtype, or None. Raises WireMismatch."""
        found: dict[int, tuple[tuple[int, ...], torch.dtype] | None] = {}
        for place, kind in self.seen:
            _checked(place, (int,))
            if kind is not None:
                shape, dtype = _checked(kind, (list,))
                kind = tuple(_checked(n, (int,)) for n in shape), _dtype(dtype)
            found[place] = kind
        return found

    def of_method(self, name: str) -> Any:
        """Return the recorded value of `numpy` or `tolist` of an absent tensor."""
        is_list = name == "tolist"
        return self._tell("list" if is_list else "numpy", lambda: None, _listed if is_list else _array)

    def to_bytes(self, unit: str, device: torch.device) -> Tensor:
        """Encode the reads as a tensor of shape (TOLD_BYTES,), uint8. Raises BadInput if they do not fit."""
        text = json.dumps(list(self.seen)).encode()
        if len(text) > TOLD_BYTES - _HEAD:
            raise split_error(
                wanted=f"{unit} to read at most {TOLD_BYTES - _HEAD} bytes of tensor values in Python (.item(), "
                ".tolist()), as its Python outputs depend on them and later stages receive them",
                got=f"{len(text)} bytes",
                do=lambda say: (
                    f"return tensors, or set {say.cuts} so that one stage has {unit} and all code that reads its "
                    "outputs"
                ),
            )
        framed = len(text).to_bytes(_HEAD, "big") + text
        return torch.frombuffer(bytearray(framed.ljust(TOLD_BYTES, b"\0")), dtype=torch.uint8).to(device)

    @staticmethod
    def of_bytes(message: Tensor) -> ValueReads:
        """Decode a tensor made by `to_bytes`; raise WireMismatch if it is malformed."""
        given = bytes(message.cpu().numpy())
        length = int.from_bytes(given[:_HEAD], "big")
        if len(given) != TOLD_BYTES or length > TOLD_BYTES - _HEAD:
            raise WireMismatch(
                f"stage boundary: wanted at most {TOLD_BYTES - _HEAD} bytes of value reads in a message of "
                f"{TOLD_BYTES}, got {length} bytes in a message of {len(given)}: {_REPORT}"
            )
        try:
            seen = json.loads(given[_HEAD : _HEAD + length])
        except ValueError as error:
            raise WireMismatch(f"stage boundary: wanted value reads as JSON, got {error}: {_REPORT}") from None
        if not isinstance(seen, list) or not all(isinstance(one, list) and len(one) == 2 for one in seen):
            raise WireMismatch(
                f"stage boundary: wanted value reads as a list of kinds and values, got other JSON: {_REPORT}"
            )
        return ValueReads(deque(seen))

    def _note(self, kind: str, run: Callable[[], Any], like: Callable[[Any], Any]) -> Any:
        found = run()
        self.seen.append([kind, _plain(kind, found)])
        return found

    def _tell(self, kind: str, run: Callable[[], Any], like: Callable[[Any], Any]) -> Any:
        if not self.seen or self.seen[0][0] != kind:
            said = f"{self.seen[0][0]}" if self.seen else "nothing more"
            raise WireMismatch(
                "stage boundary: wanted a unit to read the same kinds of tensor values when a later stage runs it "
                f"again ({said}), got a read of a {kind}: let its reads depend on nothing but its inputs"
            )
        return like(self.seen.popleft()[1])


Follow = Callable[[str, Callable[[], Any], Callable[[Any], Any]], Any]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, follow: Follow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follow = follow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if takes_number(func):
            return self.follow("number", lambda: func(*args, **kwargs), _number)
        if takes_shape(func, args):
            run = partial(func, *args, **kwargs)
            return self.follow("shape", run, partial(_of_shapes, args, kwargs, run))
        return func(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _TAKES_ALL.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        return self.follow(kind, lambda: func(*args, **(kwargs or {})), _array if kind == "numpy" else _listed)


def _plain(kind: str, found: Any) -> Any:
    if kind == "shape":
        return [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in tree_leaves(found)]
    if kind == "numpy":
        return [list(found.shape), found.dtype.str, found.ravel().tolist()]
    return {"real": found.real, "imaginary": found.imag} if isinstance(found, complex) else found


def _number(told: Any) -> Any:
    if isinstance(told, Mapping):
        return complex(told["real"], told["imaginary"])
    return _checked(told, (bool, int, float))


def _listed(told: Any) -> Any:
    return [_listed(x) for x in told] if isinstance(told, list) else _number(told)


def _array(told: Any) -> Any:
    shape, kind, values = _checked(told, (list,))
    return np.array(values, dtype=np.dtype(kind)).reshape(shape)


def _of_shapes(args: Any, kwargs: Any, run: Callable[[], Any], told: Any) -> Any:
    """Return absent tensors of these shapes; if no argument is absent, the operator's own output."""
    first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, AbsentTensor)), None)
    if first is None:
        return run()
    made = [first.absence.shaped(first, tuple(shape), _dtype(kind)) for shape, kind in told]
    return made[0] if len(made) == 1 else tuple(made)


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _checked(name, (str,)), None)
    return _checked(found, (torch.dtype,))  # type: ignore[no-any-return]


def _checked(told: Any, kinds: tuple[type, ...]) -> Any:
    if type(told) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise WireMismatch(f"stage boundary: wanted a value read of type {names}, got {type(told).__name__}: {_REPORT}")
    return told
