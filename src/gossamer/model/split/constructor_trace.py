"""Trace of a constructor whose parameters have no memory: does it build the same model as with real tensors?

It does if each parameter is initialized from constants, from the default generator, and from itself alone. Anything
else that a constructor does with parameter values is found here, operator by operator, and is a reason to run it with
real tensors: a value that Python reads, a parameter or buffer that is computed from another parameter, a copy of one, a
generator of its own, a tensor without data that outlives the constructor.

The trace also keeps a tape, one hash of all operators with their arguments. It reveals a constructor that does other
things every time, or on every rank.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.constructor_state import has_memory
from gossamer.model.split.trace_backends import EagerOps, unlogged, written

_aten = torch.ops.aten
_CONSTANT = {_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full}
_SHAPE_ALONE = _CONSTANT | {
    *(_aten.empty_like, _aten.new_empty, _aten.new_empty_strided),
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like),
}
_LOOKS = {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__}
# Draws until it accepts, and writes nothing but its tensor: the number of draws does not matter, as draws are keyed.
_REPEATS = torch.nn.init._no_grad_trunc_normal_.__code__
_FOREIGN = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}  # elements that torch did not make
_MARK = "gossamer_constructor"  # attribute of the trace's fake mode, to recognize its tensors
_DEEP = 24  # frames between an initializer and its operator, at most
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class ConstructorFinding:
    """A reason why a constructor must run with real parameters. `{}` in `said` is replaced by a parameter's name."""

    said: str
    numbers: tuple[int, ...] = ()
    matters_to_loaded: bool = True  # also if all parameters are loaded afterwards

    def told(self, names: Sequence[str]) -> str:
        """Return the reason as text. `names`: parameter names in the order of their registration."""
        return self.said.format(*(names[n] if n < len(names) else f"parameter {n}" for n in self.numbers))


class NotSimple(Exception):
    """An error that says that a constructor must run with real parameters."""

    def __init__(self, finding: ConstructorFinding) -> None:
        super().__init__(finding.told(()))
        self.finding = finding


class ConstructorTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A trace of one run of a constructor. Parameters are numbered in the order of their first registration.

    `wanted`: numbers of the parameters that keep their memory; the others become fake tensors when they are registered.
    `is_loaded`: parameter values are loaded from a file later.
    """

    def __init__(self, wanted: frozenset[int], *, is_loaded: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.is_loaded = wanted, is_loaded
        self.finding: ConstructorFinding | None = None
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        setattr(self._mode, _MARK, id(self))
        self._memory = EagerOps()
        self._tape = hashlib.blake2b(digest_size=6)
        self._made: dict[int, tuple[nn.Parameter, int]] = {}  # by id: registered parameter, its number
        self._given: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by id: parameter, its replacement
        self._replaced: dict[int, tuple[StorageWeakRef, int]] = {}  # memory of replaced parameters
        self._sources: dict[int, frozenset[int]] = {}  # memory -> parameters it is computed from
        self._known: set[int] = set()  # memory that operators made
        self._is_ours = False  # our own operators run, not the constructor's

    @property
    def tape(self) -> int:
        """Return a 48-bit hash of all operators run so far."""
        return int.from_bytes(self._tape.digest(), "big")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace the constructor that runs in this context."""
        handle = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        dtype = torch.get_default_dtype()
        try:
            with unlogged(), warnings.catch_warnings(), self, _Looks(self):
                warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
                yield
        finally:
            handle.remove()
            torch.set_default_dtype(dtype)

    def order(self, module: nn.Module) -> dict[str, int]:
        """Return the number of each parameter of the finished module; -1 if it was never registered, but copied."""
        return {name: self._number(p) for name, p in module.named_parameters()}

    def check(self, module: nn.Module) -> None:
        """Raise NotSimple if a parameter or buffer of the finished module is a copy, or computed from another one."""
        if self.finding is not None:  # the constructor may have caught the exception
            raise NotSimple(self.finding)
        for name, parameter in module.named_parameters():
            number = self._number(parameter)
            if number < 0:
                self._stop(f"{_safe(name)} is a copy, made of other parameters", matters_to_loaded=False)
            others = tuple(sorted(self._sources.get(self._memory.key(parameter), frozenset()) - {number}))
            if others:
                self._stop(f"{_safe(name)} is computed from {{}}", others[:1], matters_to_loaded=False)
            if isinstance(parameter, FakeTensor) and not self._is_meta(parameter):
                self._stop(f"{_safe(name)} is given other memory", matters_to_loaded=False)
        for name, buffer in module.named_buffers():
            if isinstance(buffer, FakeTensor):
                others = tuple(sorted(self._sources.get(self._memory.key(buffer), frozenset())))[:1]
                self._stop(f"{_safe(name)} is computed from {'{}' if others else 'the numbers of a parameter'}", others)

    def check_left(self, module: nn.Module) -> None:
        """Raise NotSimple if a tensor without data outlives the constructor.

        Call it after fake parameters were removed from `module`. It forgets the numbers of the parameters.
        """
        self._made.clear()
        self._given.clear()
        if not self._is_left():
            return
        gc.collect()  # frees reference cycles
        if self._fakes_alive():
            self._stop(f"{_place_of_fake(module)} is computed from the numbers of a parameter")
        for memory, number in self._replaced.values():
            if not memory.expired():  # type: ignore[no-untyped-call]
                self._stop("the memory of {} is kept by something else as well", (number,))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_ours or func.namespace == "prim":  # asks for the device of a fake tensor
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        fakes = [x for x in leaves if isinstance(x, FakeTensor)]
        repeats = _repeating()
        if repeats is None:
            self._write_down(func, leaves)
        elif func is _aten._local_scalar_dense.default and fakes:
            return torch.zeros((), dtype=fakes[0].dtype).item()
        elif any(self._from([x]) for x in written(func, args, kwargs)):
            self._write_down(func, [repeats.f_locals[name] for name in ("mean", "std", "a", "b")])
        self._look(func, args, kwargs, leaves)
        if fakes and func.overloadpacket in _CONSTANT:
            return func(_real_like(args[0]), *args[1:], **kwargs)
        try:
            out = func(*args, **kwargs)
        except Exception:
            if fakes:
                self._stop(f"{_safe(str(func))} needs the numbers of {{}}", self._from(fakes)[:1] or (len(self._made),))
            raise
        self._follow(func, args, kwargs, fakes, out)
        self._forget_fakes()
        return out

    def looked(self, tensor: Tensor) -> None:
        """Raise NotSimple, as Python reads the values of `tensor`."""
        numbers = self._from([tensor])[:1]
        self._stop(f"a number is read from {'{}' if numbers else 'what a parameter is initialized with'}", numbers)

    def _look(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> None:
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.looked(args[0])
        if any(isinstance(x, torch.Generator) and x is not torch.default_generator for x in leaves):
            self._stop("the constructor draws from a generator of its own", matters_to_loaded=False)
        for x in tensors:
            memory, number = self._replaced.get(self._memory.key(x), (None, 0))
            if memory is not None and not memory.expired():  # type: ignore[no-untyped-call]
                self._stop("the tensor that {} was made of is used again", (number,))
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        if fakes and not all(isinstance(x, FakeTensor) for x in written(func, args, kwargs)):
            self._stop("a tensor is written from {}", self._from(fakes)[:1] or (len(self._made),))

    def _follow(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[Tensor], out: Any) -> None:
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if func not in _FOREIGN:
            self._known.update(self._memory.key(x) for x in outs)
        if fakes and func.overloadpacket not in _SHAPE_ALONE:
            found = frozenset(self._from(fakes))
            for x in [*outs, *written(func, args, kwargs)]:
                key = self._memory.key(x)
                self._sources[key] = self._sources.get(key, frozenset()) | found

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Return the parameter to register, itself or a fake one; None if there is none."""
        if parameter is None:
            return None
        if id(parameter) in self._made:
            return parameter
        before = self._given.get(id(parameter))
        if before is not None and before[0]() is parameter:
            return before[1]
        if is_lazy(parameter) or type(parameter) not in (nn.Parameter, FakeTensor):
            self._stop(f"{_safe(name)} of a {type(module).__name__} is a {type(parameter).__name__}")
        if not isinstance(parameter, FakeTensor) and not has_memory(parameter):
            self._stop(f"{_safe(name)} of a {type(module).__name__} has no numbers, or repeats one")
        self._write_down("register", [parameter])
        number = len(self._made)
        kept = parameter if number in self.wanted else self._fake(parameter)
        self._made[id(kept)] = (kept, number)
        if kept is not parameter:
            self._given[id(parameter)] = (weakref.ref(parameter), kept)
            self._replaced[self._memory.key(parameter)] = (_weakly(parameter), number)
        before_it = self._sources.get(self._memory.key(parameter), frozenset())
        self._sources[self._memory.key(kept)] = before_it | {number}
        return kept

    def _fake(self, parameter: nn.Parameter) -> nn.Parameter:
        self._is_ours = True
        with self._mode:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        kept = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        self._is_ours = False
        self._forget_fakes()
        if not isinstance(parameter, FakeTensor):
            vars(kept).update(vars(parameter))
        return kept

    def _is_left(self) -> bool:
        return self._fakes_alive() or not all(memory.expired() for memory, _ in self._replaced.values())  # type: ignore[no-untyped-call]

    def _fakes_alive(self) -> bool:
        """Return whether fake tensors of this trace are alive, also those of a copy of the mode (made by deepcopy)."""
        alive = [x for x in gc.get_objects() if type(x) is FakeTensor]
        return any(getattr(x.fake_mode, _MARK, 0) == id(self) for x in alive)

    def _forget_fakes(self) -> None:
        """Drop weak references to fake tensors: with them `module.to` could not change their type."""
        self._mode.fake_tensor_converter.meta_converter.tensor_memo.clear()

    def _number(self, parameter: nn.Parameter) -> int:
        return self._made[id(parameter)][1] if id(parameter) in self._made else -1

    def _from(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the numbers of the parameters that tensors are computed from."""
        return tuple(sorted({n for x in tensors for n in self._sources.get(self._memory.key(x), frozenset())}))

    def _is_meta(self, fake: FakeTensor) -> bool:
        return fake.untyped_storage().device.type == "meta"

    def _stop(self, said: str, numbers: tuple[int, ...] = (), *, matters_to_loaded: bool = True) -> None:
        if self.is_loaded and not matters_to_loaded:
            return
        self.finding = self.finding or ConstructorFinding(said, numbers, matters_to_loaded)
        raise NotSimple(self.finding)

    def _write_down(self, done: Any, leaves: Sequence[Any]) -> None:
        said = [str(done)]
        for x in leaves:
            if isinstance(x, Tensor):
                said.append(f"{tuple(x.shape)} {x.dtype} {self._content(x)}")
            else:
                said.append(repr(x) if isinstance(x, _SCALARS) else type(x).__name__)
        self._tape.update("\0".join(said).encode())

    def _content(self, tensor: Tensor) -> str:
        """Return a hash of elements that no operator made: of numpy arrays, lists, files; "" for other tensors."""
        key = self._memory.key(tensor)
        if isinstance(tensor, FakeTensor) or key in self._known or tensor.layout is not torch.strided:
            return ""
        self._known.add(key)
        if tensor.device.type != "cpu" or not tensor.numel():
            return ""
        content = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        return hashlib.blake2b(content.numpy().data, digest_size=6).hexdigest()


class _Looks(TorchFunctionMode):
    """A mode that sees reads of tensor values that no operator shows."""

    def __init__(self, constructor: ConstructorTrace) -> None:
        self._constructor = constructor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS and args and isinstance(args[0], FakeTensor):
            self._constructor.looked(args[0])
        return func(*args, **(kwargs or {}))


def _repeating() -> FrameType | None:
    """Return the frame of an initializer that draws repeatedly, if one calls the present operator."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEEP):
        if frame is None or frame.f_code is _REPEATS:
            return frame
        frame = frame.f_back
    return None


def _real_like(fake: Tensor) -> Tensor:
    """Return a real tensor like a fake one: zeros, ones and the like of a parameter have data even if it has none."""
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _weakly(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _place_of_fake(module: nn.Module) -> str:
    """Return the name of the attribute that holds a fake tensor."""
    for path, inner in module.named_modules():
        for name, held in vars(inner).items():
            if any(isinstance(x, FakeTensor) for x in tree_leaves(held)):
                return _safe(f"{path}.{name}" if path else name)
    return "a tensor outside of the modules"


def _safe(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")
