"""Logits that are not there: a tensor that knows what it would be, and whose cross-entropy is computed without it.

A head's output becomes an `UnmadeLogits`. Slices, other shapes of its tokens, wider dtypes, factors and one tanh make
other `UnmadeLogits`; `F.cross_entropy` and `logsumexp` of one go to `CutHead`. Anything else computes the logits, by
the very operations that the model asked for, and goes on with these: the result is right, and nothing is saved.
Autograd that does not ask Python (functions in C++, custom ones) finds a graph whose backward computes them, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from gossamer.ops.cut_cross_entropy import IGNORE, LogitMap

Step = Callable[[Tensor], Tensor]

_FACTS = frozenset(
    """
    shape ndim dtype device layout requires_grad is_leaf grad_fn names is_meta is_cuda is_cpu is_sparse is_quantized
    is_mkldnn is_nested is_xpu is_mps output_nr _backward_hooks _version grad size dim ndimension numel nelement stride
    is_contiguous is_floating_point is_complex element_size get_device is_inference is_same_size __len__ __hash__
    _is_view is_shared
    """.split()  # noqa: SIM905
)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ipow__ set_ requires_grad_".split()  # noqa: SIM905
)


@dataclass(slots=True)
class Product:
    """The product of hidden states (*, D) and a head that an `UnmadeLogits` stands for. `loss` computes cross-entropy
    and `lse` log-sum-exps of hidden states and a map without the logits; `on_made` hears what asked for the logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    compute: torch.dtype
    loss: Callable[[UnmadeLogits, Tensor, str, int], Tensor]
    lse: Callable[[UnmadeLogits], Tensor]
    on_made: Callable[[str], None]
    logits: Tensor | None = None
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def made(self, why: str) -> Tensor:
        """Return the logits as the head computes them. Raises RuntimeError if its inputs have changed since."""
        if self.logits is None:
            if self.versions != self._versions():
                raise RuntimeError(
                    f"logits that were never computed are asked for by {why}, after the head or its input has changed: "
                    "read logits in the step that they belong to, or leave cut_cross_entropy out of plan.savers"
                )
            self.on_made(why)
            with torch.autocast(self.hidden.device.type, enabled=False):
                cast = None if self.bias is None else self.bias.to(self.compute)
                self.logits = F.linear(self.hidden.to(self.compute), self.weight.to(self.compute), cast)
        return self.logits

    def _versions(self) -> tuple[int, ...]:
        each = (self.hidden, self.weight, self.bias)
        return tuple(one._version for one in each if one is not None and not one.is_inference())


class UnmadeLogits(Tensor):
    """Logits (*, V) of a product that have not been computed. `hidden` (*, D): their rows; `map`: what was done since
    the product; `steps`: the operations that did it.
    """

    product: Product
    hidden: Tensor
    map: LogitMap
    steps: tuple[Step, ...]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> UnmadeLogits:
        made: UnmadeLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @staticmethod
    def of(product: Product) -> UnmadeLogits:
        """Return the output of a head."""
        hidden = product.hidden
        made: UnmadeLogits = _OfProduct.apply(hidden, product.weight, product.bias, product)  # type: ignore[no-untyped-call]
        return made._knowing(product, hidden, LogitMap(), ())

    def made(self, why: str) -> Tensor:
        """Return the logits. `why`: the operation that needs them."""
        value = self.product.made(why)
        for step in self.steps:
            value = step(value)
        return value

    def after(self, step: Step, *, hidden: Tensor | None = None, map: LogitMap | None = None) -> UnmadeLogits:
        """Return the result of `step`, which selects rows, whose hidden states are `hidden`, or changes the map."""
        rows = self.hidden if hidden is None else hidden
        with torch.no_grad():
            dtype = step(torch.empty((), dtype=self.dtype)).dtype if hidden is None else self.dtype
        shape = torch.Size((*rows.shape[:-1], self.shape[-1]))
        made: UnmadeLogits = _OfLogits.apply(self, step, shape, dtype)  # type: ignore[no-untyped-call]
        return made._knowing(self.product, rows, self.map if map is None else map, (*self.steps, step))

    def _knowing(self, product: Product, hidden: Tensor, map: LogitMap, steps: tuple[Step, ...]) -> UnmadeLogits:
        self.product, self.hidden, self.map, self.steps = product, hidden, map, steps
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnmadeLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = _name_of(func)
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        _refuse_writes(name, args, given)
        if args and isinstance(args[0], UnmadeLogits) and args[0].product.logits is None:
            found = _known(args[0], func, name, args[1:], given)
            if found is not None:
                return found
        elif _FACTORS.get(name) == "mul" and len(args) == 2 and not given and isinstance(args[1], UnmadeLogits):
            found = None if args[1].product.logits is not None else _times(args[1], "mul", args[0])
            if found is not None:
                return found
        plain = tree_map(lambda one: one.made(name) if isinstance(one, UnmadeLogits) else one, (args, given))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute the logits for code below autograd, whose graph leads back through `_OfLogits` and `_OfProduct`."""
        if func is torch.ops.aten.detach.default:
            return args[0]._again()
        _refuse_writes(func._schema.name.rpartition("::")[2], args, kwargs or {})
        with torch.no_grad():
            plain = tree_map(
                lambda one: one.made(str(func)).detach() if isinstance(one, UnmadeLogits) else one,
                (args, dict(kwargs or {})),
            )
        return func(*plain[0], **plain[1])

    def _again(self) -> UnmadeLogits:
        made = UnmadeLogits(self.shape, self.dtype, self.device)
        if hasattr(self, "product"):
            made._knowing(self.product, self.hidden, self.map, self.steps)
        return made


class _OfProduct(torch.autograd.Function):
    """Autograd's link from a head's output to its inputs, for code that computes with the logits unseen."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> UnmadeLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.compute = product.compute
        return UnmadeLogits(torch.Size((*hidden.shape[:-1], weight.shape[0])), product.compute, hidden.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        compute, needs = ctx.compute, ctx.needs_input_grad
        flat = gradient.flatten(0, -2) if gradient.ndim > 1 else gradient.unsqueeze(0)
        rows = hidden.reshape(-1, hidden.shape[-1]).to(compute)
        of_hidden = (gradient @ weight.to(compute)).to(hidden.dtype) if needs[0] else None
        of_weight = (flat.t() @ rows).to(weight.dtype) if needs[1] else None
        of_bias = flat.sum(0).to(bias.dtype) if bias is not None and needs[2] else None
        return of_hidden, of_weight, of_bias, None


class _OfLogits(torch.autograd.Function):
    """Autograd's link from one `UnmadeLogits` to the one that it was made of."""

    @staticmethod
    def forward(ctx: Any, logits: UnmadeLogits, step: Step, shape: torch.Size, dtype: torch.dtype) -> UnmadeLogits:
        ctx.logits, ctx.step = logits, step
        return UnmadeLogits(shape, dtype, logits.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            before = ctx.logits.made("a backward").detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.step(before), before, gradient)
        return found, None, None, None


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name


def _refuse_writes(name: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    is_written = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if args else None
    if (is_written and isinstance(first, UnmadeLogits)) or isinstance(given.get("out"), UnmadeLogits):
        raise ChangedInPlaceError(name)


class ChangedInPlaceError(RuntimeError):
    """Logits that were never computed are to be changed in place: other views of them would not see it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model changes its logits in place ({name}), which cut_cross_entropy does not compute")


_FACTORS: Mapping[str, str] = {
    "mul": "mul",
    "__mul__": "mul",
    "__rmul__": "mul",
    "multiply": "mul",
    "div": "div",
    "__truediv__": "div",
    "true_divide": "div",
    "divide": "div",
}


def _known(logits: UnmadeLogits, func: Any, name: str, rest: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Return the result of an operation that needs no logits; None for others."""
    if name == "cross_entropy":
        return _cross_entropy(logits, *rest, **given)
    if name == "logsumexp" and _last_dim(logits, *rest, **given):
        return logits.product.lse(logits)
    if name in _FACTORS and len(rest) == 1 and not given:
        return _times(logits, _FACTORS[name], rest[0])
    if name == "tanh" and not rest and not given and not logits.map.is_capped:
        return logits.after(torch.tanh, map=logits.map.capped())
    if name in ("float", "to", "contiguous", "type"):
        return _cast(logits, func, rest, given)
    if name == "__getitem__" and len(rest) == 1:
        return _selected(logits, rest[0])
    if name in ("view", "reshape", "flatten") and not (set(given) - {"start_dim", "end_dim"}):
        return _shaped(logits, func, rest, given)
    return None


def _cross_entropy(
    logits: UnmadeLogits,
    target: Any = None,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not is_plain or logits.ndim != 2 or not isinstance(target, Tensor) or target.shape != logits.shape[:1]:
        return None
    if target.dtype is not torch.int64 or reduction not in ("mean", "sum", "none"):
        return None
    return logits.product.loss(logits, target, reduction, ignore_index).to(logits.dtype)


def _last_dim(logits: UnmadeLogits, dim: Any = None, keepdim: bool = False) -> bool:
    return dim in (-1, logits.ndim - 1, (-1,), [-1]) and not keepdim


def _times(logits: UnmadeLogits, name: str, factor: Any) -> UnmadeLogits | None:
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor:
        return None
    change: Step = (lambda x: x * factor) if name == "mul" else (lambda x: x / factor)
    return logits.after(change, map=logits.map.scaled(factor if name == "mul" else 1.0 / factor))


def _cast(logits: UnmadeLogits, func: Any, rest: tuple[Any, ...], given: dict[str, Any]) -> UnmadeLogits | None:
    """Return the logits in a dtype that holds all of their values, on the same device."""
    if set(given) - {"dtype", "device", "memory_format", "non_blocking", "copy"}:
        return None
    probe = func(torch.empty((), dtype=logits.dtype, device=logits.device), *rest, **given)
    if not isinstance(probe, Tensor) or probe.device != logits.device or not probe.dtype.is_floating_point:
        return None
    if torch.promote_types(probe.dtype, logits.dtype) is not probe.dtype:
        return None
    dtype = probe.dtype
    return logits if dtype is logits.dtype else logits.after(lambda x: x.to(dtype))


def _selected(logits: UnmadeLogits, index: Any) -> UnmadeLogits | None:
    """Return some of the tokens; None where the index reaches into the vocabulary or adds dims."""
    if isinstance(index, Tensor):
        fits = index.dtype in (torch.bool, torch.int64) and index.ndim < logits.ndim
        return logits.after(operator.itemgetter(index), hidden=logits.hidden[index]) if fits else None
    parts = list(index) if isinstance(index, tuple) else [index]
    if any((one is not Ellipsis and not isinstance(one, int | slice)) or isinstance(one, bool) for one in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (logits.ndim - len(parts) + 1)
    if Ellipsis in parts or len(parts) > logits.ndim or (len(parts) == logits.ndim and parts[-1] != slice(None)):
        return None
    rows = tuple(parts[: logits.ndim - 1])
    return logits.after(operator.itemgetter(rows), hidden=logits.hidden[rows]) if rows else logits


def _shaped(logits: UnmadeLogits, func: Any, rest: tuple[Any, ...], given: dict[str, Any]) -> UnmadeLogits | None:
    """Return the tokens in other dims; None where the vocabulary does not stay the last one."""
    if any(isinstance(one, torch.dtype) for one in rest):
        return None
    wanted = func(torch.empty(logits.shape, device="meta"), *rest, **given).shape
    if not wanted or wanted[-1] != logits.shape[-1] or not logits.numel():
        return None
    hidden = logits.hidden.reshape(*wanted[:-1], logits.hidden.shape[-1])
    return logits.after(lambda x: x.reshape(wanted), hidden=hidden)
