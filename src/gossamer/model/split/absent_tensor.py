"""Absent tensors: placeholders for tensors that this stage does not hold. They have a shape, dtype and device, no data.

A stage runs the user's whole forward. The outputs of other stages' units and the parameters of other stages are absent
tensors. Whatever is computed from them is absent too. In any forward, a read of their values by Python raises BadInput
with the tensor's name, and so does a unit of this stage or a loss computed from one. If a stage has no unit left to
run, its forward ends there instead.

An operator that writes an absent tensor into real memory marks that memory as absent until it is freed or fully
overwritten. A dispatch mode checks reads of memory while there are such marks.
Cost: none without absent tensors; about 50 us for each operator on absent tensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gossamer.model.split.output_leaf import Produced
from gossamer.model.split.split_error import split_error
from gossamer.model.split.trace_backends import GROUPED, changed, like_bf16, unlogged
from gossamer.spec.errors import BadInput

_LIKE = (
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
)  # fmt: skip
_FACTORIES = frozenset(f"aten::{name}" for name in _LIKE)  # they read the shape of their argument, no values
_WHOLE = frozenset(("aten::copy_", "aten::zero_", "aten::fill_"))  # they overwrite their first argument entirely
_TURNED = frozenset(  # they change shape and strides of their argument, no values
    getattr(torch.ops.aten, name).default for name in ("transpose_", "t_", "swapaxes_", "swapdims_", "unsqueeze_")
) | {torch.ops.aten.squeeze_.default, torch.ops.aten.squeeze_.dim, torch.ops.aten.squeeze_.dims}
_UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_HERE = str(Path(__file__).parents[2])


class AbsentTensor(Tensor):
    """A tensor without data on this stage. `origin`: describes the unit output or parameter it is computed from."""

    shadow: Tensor  # a fake tensor: shape, strides, dtype and device
    origin: str
    absence: StageAbsence

    @staticmethod
    def __new__(
        cls, shadow: Tensor, origin: str, absence: StageAbsence, *, requires_grad: bool = False
    ) -> AbsentTensor:
        made: AbsentTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=shadow.device,
            requires_grad=requires_grad,
        )
        made.shadow, made.origin, made.absence = shadow, origin, absence
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        absence = next(x.absence for x in tree_leaves((args, kwargs)) if isinstance(x, AbsentTensor))
        return absence.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{tuple(self.shape)} {self.dtype}, {self.origin}: on another stage>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the value that the owning stage recorded, in a shadow run; otherwise raise, as there is no data."""
        return self.absence.look("numpy", self.origin)

    def tolist(self) -> Any:
        """Return the value that the owning stage recorded, in a shadow run; otherwise raise, as there is no data."""
        return self.absence.look("tolist", self.origin)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.absence.look("dlpack", self.origin)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = AbsentTensor(self.shadow, self.origin, self.absence, requires_grad=self.requires_grad)
        if isinstance(self, nn.Parameter):
            copied._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.absence.look("pickle", self.origin)


@functools.cache
def _fakes() -> FakeTensorMode:
    """Return the one mode of all fake tensors: an absent tensor may be copied with its module."""
    return FakeTensorMode(allow_fallback_kernels=False)


class Over(BaseException):
    """A signal that ends the forward of a stage: no unit of it is left to run, and the next code needs absent values.

    Not an Exception: a forward that catches those must not catch this one.
    """


@dataclass
class StageAbsence:
    """A per-stage record of which tensors are absent; it creates them and runs or refuses operators on them."""

    stage: int
    unit: str = ""  # the unit of this stage that is running
    is_over: bool = False  # no unit of this stage is left to run, and another stage computes the loss
    is_on: bool = False  # whether a forward runs
    refused: BadInput | None = None  # the first error, even if user code catches it
    marks: dict[int, tuple[StorageWeakRef, str]] = field(default_factory=dict)  # memory -> origin of the write
    fakes: FakeTensorMode = field(default_factory=_fakes)
    watch: _AbsenceMode | None = None
    told: Callable[[str], Any] | None = None  # returns the value that the owning stage recorded
    is_again: Callable[[], bool] = bool  # whether a backward runs code between units once more

    def tensor(self, made: Produced, origin: str) -> Tensor:
        """Return an absent tensor like `made`; if it is written in place later, real memory marked as absent."""
        if made.written:  # in place, perhaps with a received tensor: so it has memory
            real = torch.empty(made.shape, dtype=made.dtype, device=made.device)
            self.mark(real, origin)
            return real
        with self.fakes:
            shadow = torch.empty_strided(*made.layout, dtype=made.dtype, device=made.device)
        if not made.needs_grad:
            return AbsentTensor(shadow, origin, self)
        with torch.enable_grad():  # not a leaf: autograd refuses in-place writes to leaves
            return AbsentTensor(shadow, origin, self, requires_grad=True).clone()

    def like(self, tensor: Tensor, origin: str) -> Tensor:
        """Return an absent tensor that replaces the parameter or buffer `tensor`."""
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        with self.fakes:
            shadow = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        absent = AbsentTensor(shadow, origin, self)
        if isinstance(tensor, nn.Parameter):
            absent._is_param = True  # type: ignore[attr-defined]
        return absent

    def shaped(self, other: AbsentTensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an absent tensor of another `shape` and `dtype`, on the device and with the origin of `other`."""
        with self.fakes:
            shadow = torch.empty(shape, dtype=dtype, device=other.device)
        return AbsentTensor(shadow, other.origin, self)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of the stage in this context; on exit raise the first BadInput that was refused in it."""
        self.is_on, self.is_over, self.unit, self.refused = True, False, "", None
        self.marks = {key: mark for key, mark in self.marks.items() if not mark[0].expired()}  # type: ignore[no-untyped-call]
        try:
            if self.marks:
                self._begin_watch()
            yield
        finally:
            self.is_on, self.unit = False, ""
            if self.watch is not None:
                self.watch.leave()
                self.watch = None
            if self.refused is not None:
                raise self.refused

    def origin_of(self, held: Any) -> str:
        """Return the origin of the first absent tensor in `held`; "" if all are present."""
        for x in held:
            if isinstance(x, AbsentTensor):
                return x.origin
            if self.marks and isinstance(x, Tensor) and (mark := self.marks.get(_memory(x))) is not None:
                return mark[1]
        return ""

    def mark(self, tensor: Tensor, origin: str) -> None:
        """Mark the memory of `tensor` as absent: it holds no valid data any more. `origin`: describes the write."""
        if isinstance(tensor, AbsentTensor):
            return
        storage = tensor.untyped_storage()
        self.marks[int(storage._cdata)] = (StorageWeakRef(storage), origin)  # type: ignore[no-untyped-call]
        if self.is_on and self.watch is None:
            self._begin_watch()

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that may have absent arguments."""
        origin = self.origin_of(tree_leaves((args, kwargs)))
        if not origin or _is_view_of_memory(func, args):
            return func(*args, **kwargs)
        if self._writes_all(func, args):
            self.marks.pop(_memory(args[0]), None)
            return func(*args, **kwargs)
        name = _name(func).removeprefix("aten::")
        if _name(func).partition(".")[0] in _FACTORIES:
            return func(*tree_map_only(Tensor, _hollow, tuple(args)), **kwargs)
        is_backward = not self.is_on and torch._C._current_graph_task_id() != -1
        if self.unit or (is_backward and not self.is_again()):
            self.refuse(origin, f"{self.unit} computes with it" if self.unit else "a backward computes with it")
        try:
            return self._absently(func, args, kwargs, origin)
        except _UNKNOWN as error:
            return self.look(name, origin, error)
        except RuntimeError as error:
            if "meta" in str(error).lower() or (self.is_over and not self.unit):
                return self.look(name, origin, error)
            said = str(error).partition("\n")[0]
            self.refuse(
                origin, f"{name} does not accept its shape, which is that of the traced forward ({said})", error
            )

    def look(self, name: str, origin: str, why: BaseException | None = None) -> Any:
        """Handle a read of tensor values by Python, or of a shape that depends on them. `name`: the operator or method.

        Returns the value that the owning stage recorded, in a shadow run. Raises Over if no unit of this stage is left
        to run, else BadInput.
        """
        if self.told is not None and name in ("numpy", "tolist"):
            return self.told(name)
        if self.is_on and self.is_over and not self.unit:
            raise Over
        self.refuse(origin, f"the model's code reads a value of it ({name})", why)

    def refuse(self, origin: str, how: str, cause: BaseException | None = None) -> NoReturn:
        """Raise BadInput, now and once more when the forward ends (user code may catch the first)."""
        at = user_line()
        error = split_error(
            wanted=f"stage {self.stage} to read the same tensors as in the traced forward",
            got=f"{origin}, which this stage does not have: {how}{f', at {at}' if at else ''}",
            do=lambda say: (
                "read the same tensors in every forward (whatever earlier ones counted, drew or stored), read "
                f"this one within a unit, or set {say.cuts} so that one stage has the tensor and its reader"
            ),
        )
        self.refused = self.refused or error
        raise error from cause

    def _absently(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], origin: str) -> Any:
        if isinstance(func, OpOverload):
            self._check_shapes(func, args)
            if torch.Tag.nondeterministic_seeded in func.tags:
                _draw(func, args, kwargs)
            for x in changed(func, args, kwargs):
                self.mark(x, origin)
        stands: dict[int, Tensor] = {}

        def stand_in(x: Tensor) -> Tensor:
            if isinstance(x, AbsentTensor):
                stands[id(x.shadow)] = x
                return x.shadow
            with self.fakes:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            stands[id(made)] = x
            return made

        given = tree_map_only(Tensor, stand_in, (_with_numbers(func, args), dict(kwargs)))
        with unlogged(), self.fakes:
            out = like_bf16(func, *given) if func is GROUPED else func(*given[0], **given[1])
        if func in _TURNED and isinstance(args[0], AbsentTensor):
            with no_dispatch():  # the wrapper has a shape and strides of its own, and no memory
                func(*args, **kwargs)

        def wrap(x: Tensor) -> Tensor:
            return stands[id(x)] if id(x) in stands else AbsentTensor(x, origin, self)

        return tree_map_only(Tensor, wrap, out)

    def _check_shapes(self, func: OpOverload, args: Sequence[Any]) -> None:
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], AbsentTensor) and func not in _TURNED:
            raise NotImplementedError(f"{_name(func)} changes the shape of an absent tensor")

    def _writes_all(self, func: Any, args: Sequence[Any]) -> bool:
        """Return whether an operator overwrites marked memory entirely, with real data."""
        if not self.marks or _name(func).partition(".")[0] not in _WHOLE:
            return False
        into = args[0]
        if isinstance(into, AbsentTensor) or into.untyped_storage().nbytes() != into.numel() * into.element_size():
            return False
        return not self.origin_of(x for x in args[1:] if isinstance(x, Tensor))

    def _begin_watch(self) -> None:
        self.watch = _AbsenceMode(self)
        self.watch.__enter__()  # type: ignore[no-untyped-call]


class _AbsenceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees operators read marked memory."""

    supports_higher_order_operators = True

    def __init__(self, absence: StageAbsence) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.absence = absence

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.absence.run(func, args, kwargs or {})

    def leave(self) -> None:
        """Exit this mode, whatever modes the model's code may have left entered above it."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _with_numbers(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Replace real masks by the indices at which they are true, whose number is known."""
    if func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return tuple(args)
    places: list[Any] = []
    for x in args[1]:
        is_mask = isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
        places += list(x.nonzero().unbind(1)) if is_mask and not isinstance(x, AbsentTensor) else [x]
    return (args[0], places, *args[2:])


def _draw(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Draw as the operator would, so that the random numbers after it are those of one process."""
    given = tree_map_only(Tensor, lambda x: torch.ones_like(_hollow(x)), (tuple(args), dict(kwargs)))
    func(*given[0], **given[1])


def _hollow(x: Tensor) -> Tensor:
    """Return a real tensor of the same shape in place of an absent one, so that tensors made like it are real."""
    if not isinstance(x, AbsentTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _is_view_of_memory(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator only gives marked memory another shape."""
    if not isinstance(func, OpOverload) or not (func.is_view or torch.Tag.inplace_view in func.tags):
        return False
    return not isinstance(args[0], AbsentTensor) and torch._C._current_graph_task_id() == -1


def _name(func: Any) -> str:
    return str(func._name) if isinstance(func, OpOverload) else str(func)


def _memory(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a kind of tensor without storage
        return 0


def user_line() -> str:
    """Return file:line of the user's code that is running; "" if there is none."""
    frame = sys._getframe(1)
    torchs = str(Path(torch.__file__).parent)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_HERE, torchs, "<")):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
