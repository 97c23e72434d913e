"""Trace a forward on shapes alone, and unify the dims of its tensors, operator by operator.

Tensors that depend on no parameter (masks, positions, rotary angles) are followed too, as far as their operators are
known; an unknown operator on such tensors gives new dimensions. An unknown operator on a tensor that depends on a
parameter is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.model.split.trace_backends import FakeTensorOps
from gossamer.model.structure.dimension import Clash, Dimension, parts_of, product_of, sliced, unify
from gossamer.model.structure.layouts import LAYOUTS, Dims
from gossamer.model.structure.uses import (
    ADDED,
    INDEXED,
    NORM_SCALE,
    NORM_SHIFT,
    READS,
    SCALES,
    WRITES,
    TracedNorm,
    Uses,
)
from gossamer.spec.errors import BadInput, bad_input


@dataclass(slots=True)
class _Seen:
    """What is known of a tensor. `of`: parameter and, by dim, its dim, for a parameter or a view of one."""

    tensor: Tensor  # kept, so that its id is not used again
    dims: Dims
    is_tracked: bool = False  # it depends on a parameter
    of: tuple[str, tuple[int | None, ...]] | None = None
    norm: TracedNorm | None = None  # it is what this normalization gave
    square: int | None = None  # id of the tensor of which this is the square
    mean_square: tuple[int, Dimension, float] | None = None  # id of the tensor, dim, epsilon
    root: tuple[int, Dimension, float] | None = None  # the same: this is the inverse root (or the root) of that mean
    is_inverse: bool = True
    is_ids: bool = False  # it is the token ids of the batch, or a view of them


class DimensionTrace(TorchDispatchMode):
    """A mode in which the forward of `module` (an outline without data) on token `ids` is followed."""

    def __init__(self, module: nn.Module, ids: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = FakeTensorOps(module)
        self._count = 0
        self._seen: dict[int, _Seen] = {}
        self.parameters: dict[str, Dims] = {}
        self.uses = Uses()
        self.limits: list[tuple[Dimension, str]] = []  # operators that forbid to resize a dimension
        for name, parameter in module.named_parameters():
            dims = tuple(Dimension(size) for size in parameter.shape)
            self.parameters[name] = dims
            seen = _Seen(parameter, dims, is_tracked=True, of=(name, tuple(range(len(dims)))))
            self._seen[id(parameter)] = seen
        self._of(ids).is_ids = True

    def dims_of(self, tensor: Tensor) -> Dims:
        """Return the dimensions of a tensor; new ones where it was never seen."""
        return self._of(tensor).dims

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        seen = [self._of(x) for x in given]
        self._count += 1
        for one in seen:
            if one.of is not None:
                self.uses.take(one.of[0], self._count)
        out = self._operators.run(func, args, kwargs)
        is_tracked = any(one.is_tracked for one in seen)
        try:
            self._follow(func, args, kwargs, out, is_tracked=is_tracked)
        except (Clash, _Unknown) as error:
            if is_tracked:
                raise _refusal(func, seen, str(error)) from None
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._of(x).is_tracked |= is_tracked
        return out

    def _of(self, tensor: Tensor) -> _Seen:
        found = self._seen.get(id(tensor))
        if found is None:
            found = self._seen[id(tensor)] = _Seen(tensor, tuple(Dimension(n) for n in tensor.shape))
        return found

    def _put(self, tensor: Tensor, dims: Sequence[Dimension], like: _Seen | None = None) -> _Seen:
        """Record a result; `like`: what it is a copy or a view of."""
        found = _Seen(tensor, tuple(dims))
        if like is not None:
            found.norm, found.square, found.mean_square = like.norm, like.square, like.mean_square
            found.root, found.is_inverse, found.is_tracked = like.root, like.is_inverse, like.is_tracked
            found.is_ids = like.is_ids
        self._seen[id(tensor)] = found
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, *, is_tracked: bool) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name.endswith("_") and name[:-1] in _SPECIAL | LAYOUTS.keys():
            name = name[:-1]
        handler: Callable[..., None] | None = getattr(self, f"_{name.strip('_')}", None) if name in _SPECIAL else None
        if handler is not None:
            handler(args, kwargs, out)
        elif name in LAYOUTS:
            self._layout(name, args, kwargs, out)
        elif torch.Tag.pointwise in func.tags or name in _POINTWISE:
            self._pointwise(name, args, kwargs, out)
        elif name in _REDUCING:
            self._reduced(name, args, kwargs, out)
        elif is_tracked and any(isinstance(x, Tensor) and x.numel() > 1 for x in tree_leaves(out)):
            raise _Unknown("an operator whose dims are not known")

    def _limit(self, dim: Dimension, why: str) -> None:
        self.limits.append((dim, why))

    # Pointwise operators

    def _pointwise(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        seen = [self._of(x) for x in tensors]
        dims = [Dimension(n) for n in out.shape] if id(out) not in map(id, tensors) else list(self._of(out).dims)
        for x, one in zip(tensors, seen, strict=True):
            for back in range(1, x.dim() + 1):
                if x.shape[-back] == out.shape[-back] and x.shape[-back] != 1:
                    unify(dims[-back], one.dims[-back])
        found = self._put(out, dims)
        self._note_scales(name, args, seen, found)

    def _note_scales(self, name: str, args: Any, seen: Sequence[_Seen], found: _Seen) -> None:
        """Note parameters that are added or multiplied, and the steps of a root mean square normalization."""
        name = name.rstrip("_")
        base = next((one for one in seen if one.of is None), None)
        if (
            (name == "pow" and not isinstance(args[1], Tensor) and args[1] == 2)
            or name == "square"
            or (name == "mul" and len(seen) == 2 and seen[0] is seen[1])
        ):
            found.square = id(args[0])
        elif name == "add" and seen[0].mean_square is not None and isinstance(args[1], float | int):
            of, dim, eps = seen[0].mean_square
            found.mean_square = (of, dim, eps + float(args[1]))
        elif name in ("rsqrt", "sqrt") and seen[0].mean_square is not None:
            found.root, found.is_inverse = seen[0].mean_square, name == "rsqrt"
        elif name in ("mul", "div") and (norm := self._normed(name, seen)) is not None:
            found.norm = norm
        elif name in ("mul", "add", "sub") and len(seen) == 2 and base is not None:
            for one in seen:
                if one.of is not None:
                    self._note_parameter(name, one, base, found)
        elif name in ("_to_copy", "to", "clone", "native_dropout"):
            found.norm = seen[0].norm

    def _normed(self, name: str, seen: Sequence[_Seen]) -> TracedNorm | None:
        """Return the normalization that x * rsqrt(mean(x^2) + eps), or x / sqrt of that, is; None for another one."""
        for one, other in (seen, reversed(seen)) if len(seen) == 2 else ():
            root = other.root
            if root is not None and other.is_inverse == (name == "mul") and one.dims:
                of = self._seen[root[0]]
                if of.dims and one.dims[-1].root is root[1].root and (name == "mul" or seen[0] is one):
                    norm = TracedNorm("rms", root[2], root[1])
                    self.uses.norms.append(norm)
                    return norm
        return None

    def _note_parameter(self, name: str, one: _Seen, base: _Seen, found: _Seen) -> None:
        assert one.of is not None
        parameter, places = one.of
        norm = base.norm
        is_of_norm = norm is not None and len(one.dims) == 1 and one.dims[0].root is norm.dim.root
        for place in places:
            if name == "mul" and is_of_norm and norm is not None and "weight" not in norm.names:
                norm.names["weight"] = parameter
                found.norm = norm
                self.uses.add(parameter, place, NORM_SCALE)
            elif name == "mul":
                self.uses.add(parameter, place, SCALES)
            else:
                self.uses.add(parameter, place, ADDED)

    # Contractions

    def _contract(self, a: Tensor, b: Tensor, out: Tensor, batch: int) -> Dims:
        left, right = self._of(a), self._of(b)
        for x, y in zip(left.dims[:batch], right.dims[:batch], strict=True):
            unify(x, y)
        unify(left.dims[-1], right.dims[-2])
        if left.of is None and right.of is None:
            self._limit(left.dims[-1], "the contraction of two activations")
        for one, other, inner in ((left, right, -1), (right, left, -2)):
            if one.of is not None:
                name, places = one.of
                outer = -2 if inner == -1 else -1
                self.uses.add(name, places[inner], READS)
                self.uses.add(name, places[outer], WRITES)
                for place in places[:batch]:
                    self.uses.add(name, place, SCALES)
                self.uses.norms_read.setdefault(name, set()).add(other.norm)
        dims = (*left.dims[:batch], left.dims[-2], right.dims[-1])
        self._put(out, dims)
        return dims

    def _mm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._contract(args[0], args[1], out, 0)

    def _bmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._contract(args[0], args[1], out, 1)

    def _addmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._biased(args[0], self._contract(args[1], args[2], out, 0))

    def _baddbmm(self, args: Any, kwargs: Any, out: Tensor) -> None:
        self._biased(args[0], self._contract(args[1], args[2], out, 1))

    def _biased(self, bias: Tensor, dims: Dims) -> None:
        seen = self._of(bias)
        for back in range(1, bias.dim() + 1):
            if bias.shape[-back] != 1:
                unify(dims[-back], seen.dims[-back])
        if seen.of is not None:
            for place in seen.of[1]:
                self.uses.add(seen.of[0], place, ADDED)

    def _attention(self, args: Any, kwargs: Any, out: Any) -> None:
        query, key, value = (self._of(x) for x in args[:3])
        unify(query.dims[0], key.dims[0])
        unify(key.dims[0], value.dims[0])
        unify(key.dims[1], value.dims[1])
        heads, grouped = query.dims[1], key.dims[1]
        if heads.size == grouped.size:
            unify(heads, grouped)
        else:
            unify(heads, product_of([grouped, Dimension(heads.size // grouped.size)]))
        unify(query.dims[-1], key.dims[-1])
        unify(key.dims[-2], value.dims[-2])
        self._limit(query.dims[-1], "the contraction of queries and keys")
        first = out if isinstance(out, Tensor) else out[0]
        self._put(first, (*query.dims[:-1], value.dims[-1]))

    _scaled_dot_product_attention = _attention
    _scaled_dot_product_flash_attention_for_cpu = _attention
    _scaled_dot_product_attention_math = _attention
    _scaled_dot_product_efficient_attention = _attention
    _scaled_dot_product_flash_attention = _attention

    def _embedding(self, args: Any, kwargs: Any, out: Tensor) -> None:
        table, ids = self._of(args[0]), self._of(args[1])
        if table.of is not None:
            name, places = table.of
            self.uses.add(name, places[0], INDEXED)
            self.uses.add(name, places[1], WRITES)
            if ids.is_ids:
                self.uses.tables.append(name)
        self._put(out, (*ids.dims, table.dims[1]))

    # Reductions

    def _native_layer_norm(self, args: Any, kwargs: Any, out: Any) -> None:
        x, shape, weight, bias, eps = args[:5]
        self._a_norm("layer", x, shape, weight, bias, eps, out[0])

    def _fused_rms_norm(self, args: Any, kwargs: Any, out: Any) -> None:
        x, shape, weight, eps = args[:4]
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        self._a_norm("rms", x, shape, weight, None, eps, out[0])

    def _a_norm(self, kind: str, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float, out: Tensor) -> None:
        seen = self._of(x)
        if len(shape) != 1:
            raise _Unknown("a normalization over several dims")
        norm = TracedNorm(kind, float(eps), seen.dims[-1])
        for which, how, one in (("weight", NORM_SCALE, weight), ("bias", NORM_SHIFT, bias)):
            if one is None:
                continue
            of = self._of(one)
            unify(of.dims[0], seen.dims[-1])
            if of.of is None:
                raise _Unknown(f"a normalization whose {which} is no parameter")
            norm.names[which] = of.of[0]
            self.uses.add(of.of[0], of.of[1][0], how)
        self.uses.norms.append(norm)
        self._put(out, seen.dims).norm = norm

    def _softmax(self, args: Any, kwargs: Any, out: Tensor) -> None:
        seen = self._of(args[0])
        self._limit(seen.dims[args[1]], "a softmax over it")
        self._put(out, seen.dims)

    _log_softmax = _softmax
    _safe_softmax = _softmax

    def _cumsum(self, args: Any, kwargs: Any, out: Tensor) -> None:
        seen = self._of(args[0])
        self._limit(seen.dims[args[1]], "a running sum over it")
        self._put(out, seen.dims)

    def _reduced(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise _Unknown("a reduction with several results")
        seen = self._of(args[0])
        given = kwargs.get("dim", args[1] if len(args) > 1 else None)
        given = [given] if isinstance(given, int) else list(given or range(len(seen.dims)))
        reduced = {dim % len(seen.dims) for dim in given}
        kept = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
        last = len(seen.dims) - 1
        if name == "mean" and seen.square is not None and reduced == {last}:
            found = (seen.square, self._seen[seen.square].dims[-1], 0.0)
        else:
            found = None
            for dim in reduced:
                self._limit(seen.dims[dim], f"a {name} over it")
        dims = [
            Dimension(1) if dim in reduced else one for dim, one in enumerate(seen.dims) if kept or dim not in reduced
        ]
        self._put(out, dims).mean_square = found

    # Views and copies

    def _layout(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        seen = self._of(args[0])
        dims, places = LAYOUTS[name](seen.dims, args[1:], kwargs, tuple(out.shape))
        found = self._put(out, dims, seen)
        if seen.of is not None and places is not None:
            of = tuple(seen.of[1][one] if one is not None else None for one in places)
            found.of = (seen.of[0], of)
        elif seen.of is not None and len(out.shape) == len(seen.tensor.shape) and out.shape == seen.tensor.shape:
            found.of = seen.of

    def _cat(self, args: Any, kwargs: Any, out: Tensor) -> None:
        tensors = [self._of(x) for x in args[0] if x.dim() == out.dim()]
        at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        for dim in range(out.dim()):
            for one in tensors[1:]:
                if dim != at:
                    unify(tensors[0].dims[dim], one.dims[dim])
        dims = list(tensors[0].dims)
        dims[at] = parts_of([one.dims[at] for one in tensors])
        self._put(out, dims)

    def _stack(self, args: Any, kwargs: Any, out: Tensor) -> None:
        tensors = [self._of(x) for x in args[0]]
        at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
        for one in tensors[1:]:
            for x, y in zip(tensors[0].dims, one.dims, strict=True):
                unify(x, y)
        self._put(out, [*tensors[0].dims[:at], Dimension(out.shape[at]), *tensors[0].dims[at:]])

    def _split(self, args: Any, kwargs: Any, out: Any) -> None:
        seen = self._of(args[0])
        at = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(seen.dims)
        start = 0
        for one in out:
            part = sliced(seen.dims[at], start, start + one.shape[at])
            self._put(one, [*seen.dims[:at], part, *seen.dims[at + 1 :]])
            start += one.shape[at]

    _split_with_sizes = _split

    def _unbind(self, args: Any, kwargs: Any, out: Any) -> None:
        seen = self._of(args[0])
        at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(seen.dims)
        self._limit(seen.dims[at], "a selection of its elements")
        for one in out:
            self._put(one, [*seen.dims[:at], *seen.dims[at + 1 :]])

    def _select(self, args: Any, kwargs: Any, out: Tensor) -> None:
        seen = self._of(args[0])
        at = args[1] % len(seen.dims)
        self._limit(seen.dims[at], "a selection of its elements")
        self._put(out, [*seen.dims[:at], *seen.dims[at + 1 :]])


class _Unknown(Exception):
    """An operator that is not followed."""


def _refusal(func: Any, seen: Sequence[_Seen], why: str) -> BadInput:
    names = sorted({one.of[0] for one in seen if one.of is not None})
    shapes = ", ".join(str(tuple(one.tensor.shape)) for one in seen)
    of = f"{', '.join(names)} in " if names else ""
    return bad_input(
        wanted="a forward whose dims can be followed",
        got=f"{of}{func} on tensors of {shapes}: {why}",
        do="name a model whose blocks use linear layers, norms, attention and pointwise functions",
        key="model",
    )


_SPECIAL = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "embedding", "native_layer_norm", "_fused_rms_norm", "_softmax"),
        *("_log_softmax", "_safe_softmax", "cat", "stack", "split", "split_with_sizes", "unbind", "select"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention", "cumsum"),
        "scaled_dot_product_attention",
    }
)
_POINTWISE = frozenset({"where", "masked_fill", "native_dropout", "dropout", "triu", "tril", "lerp"})
_REDUCING = frozenset({"mean", "sum", "amax", "amin", "max", "min", "any", "all", "var", "std", "prod", "norm"})


@contextlib.contextmanager
def plain_attention(module: nn.Module) -> Any:
    """Let a model of transformers compute attention by matmuls and a softmax, inside this context."""
    config = getattr(module, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before is None:
        yield
        return
    config._attn_implementation = "eager"  # type: ignore[union-attr]
    try:
        yield
    finally:
        config._attn_implementation = before  # type: ignore[union-attr]
