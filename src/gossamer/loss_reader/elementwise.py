"""Elementwise operations: the rows of all inputs must be in the same dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gossamer.loss_reader import row_dims as lay
from gossamer.loss_reader.graph_nodes import kept, made, op_name, side_without_gradient
from gossamer.loss_reader.normalized import is_normalized
from gossamer.loss_reader.row_dims import RowDims, RowsMixed
from gossamer.loss_reader.row_flow import FREE, GraphStep, RowFlow, RowPath, RowPlace, known_of, need_layouts


def _by_element(flow: RowFlow, node: Any, name: str, inputs: list[RowPlace | None]) -> RowPlace:
    """Return the row dimension of an elementwise result; raise RowsMixed if the inputs' rows differ in dimension."""
    if None not in inputs and not known_of(inputs):
        return FREE
    is_linear = name in ("Add", "Sub", "Neg", "Where", "MaskedFill") or (
        name in ("Mul", "Div", "Rsub") and _is_multiple(name, inputs)
    )
    need_layouts(name, inputs, is_linear=is_linear)
    sizes = made(node)
    layouts = [one.layout for one in known_of(inputs)]
    if not layouts:
        return _met_first(flow, node, name, sizes)
    if name in ("Mul", "Div") and None in inputs[:2]:
        other = kept(node, side_without_gradient(node))
        if other is not None and is_normalized(other, layouts[0], flow.origin.rows):
            raise RowsMixed(f"{name} with numbers that were normalized over rows")
        if other is not None and other.dim():
            entered = flow.origin.layout(other, is_input=False)
            layouts += [entered] if entered is not None and _spreads(layouts[0], other.shape, len(sizes)) else []
    elif None in inputs and name in ("Add", "Sub", "Maximum", "Minimum"):
        _refuse_spread(name, layouts, sizes, _sizes_below(node))
    flow.strangers |= lay.strangers(layouts, len(sizes))
    return RowPlace(RowPath.ROWS, lay.joined(layouts, sizes, name))


def _is_multiple(name: str, inputs: Sequence[RowPlace | None]) -> bool:
    known = known_of(inputs)
    return len(known) == 1 and (name != "Div" or inputs[0] is known[0])


def _met_first(flow: RowFlow, node: Any, name: str, sizes: tuple[int, ...]) -> RowPlace:
    """Return the place of the result of parameters and a tensor without a graph."""
    if name in ("Mul", "Div"):
        other = kept(node, side_without_gradient(node))
        if other is None or not other.dim():
            return FREE
        spreads = _sizes_below(node)[0] != sizes
        return flow.entered(other, sizes, is_input=spreads) if spreads else FREE
    if all(one != sizes for one in _sizes_below(node)):
        return flow.entered_by_size(sizes)
    return FREE


def _sizes_below(node: Any) -> list[tuple[int, ...]]:
    """Return the sizes of the inputs before expansion."""
    found = []
    for one, output in node.next_functions:
        if one is None:
            continue
        while op_name(one) in ("Expand", "Clone") and one.next_functions[0][0] is not None:
            one, output = one.next_functions[0]
        found.append(made(one, output))
    return found


def _spreads(layout: RowDims, sizes: Sequence[int], ndim: int) -> bool:
    """Return whether broadcasting a tensor of `sizes` against the layout enlarges a dimension."""
    ours = (*(1 for _ in range(ndim - len(layout))), *lay.sizes_of(layout))
    theirs = (*(1 for _ in range(ndim - len(sizes))), *sizes)
    return any(a == 1 < b for a, b in zip(ours, theirs, strict=True))


def _refuse_spread(name: str, layouts: Sequence[RowDims], sizes: Sequence[int], known: Sequence[Sequence[int]]) -> None:
    """Raise RowsMixed if an unseen tensor broadcasts a dimension to the number of rows: it may have rows there."""
    counts = {lay.size_of(layout[at]) for layout in layouts for at in lay.where(layout)} - {1}
    for back in range(1, len(sizes) + 1):
        seen = {one[-back] if back <= len(one) else 1 for one in known}
        if sizes[-back] in counts and seen == {1}:
            raise RowsMixed(
                f"{name} with something that has as many numbers in a dimension of its own as there are rows"
            )


_BY_ELEMENT = {
    *("Add", "Sub", "Mul", "Div", "Rsub", "Maximum", "Minimum", "Pow", "Exp", "Exp2", "Expm1", "Log", "Log2", "Log10"),
    *(
        "Log1P",
        "Abs",
        "Sqrt",
        "Rsqrt",
        "Reciprocal",
        "Sign",
        "Sgn",
        "Sigmoid",
        "LogSigmoid",
        "Tanh",
        "Relu",
        "Gelu",
        "Silu",
    ),
    *(
        "Softplus",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Sin",
        "Cos",
        "Tan",
        "Asin",
        "Acos",
        "Atan",
        "Atan2",
        "Sinh",
        "Cosh",
    ),
    *("Asinh", "Acosh", "Atanh", "Erf", "Erfc", "Erfinv", "Lgamma", "Digamma", "Where", "MaskedFill", "Elu", "Celu"),
    *(
        "LeakyRelu",
        "PreluKernel",
        "Hardtanh",
        "Hardswish",
        "Hardsigmoid",
        "Hardshrink",
        "Softshrink",
        "Mish",
        "Threshold",
    ),
    *(
        "Addcmul",
        "Addcdiv",
        "Lerp",
        "Xlogy",
        "SpecialXlog1Py",
        "SpecialEntr",
        "Logaddexp",
        "Logaddexp2",
        "Hypot",
        "Sinc",
    ),
    *("Fmax", "Fmin", "Fmod", "Remainder", "Floor", "Ceil", "Round", "Trunc", "Frac", "NanToNum", "Logit", "Copysign"),
    *("I0", "SpecialI0E", "SpecialI1", "SpecialI1E", "Polygamma", "Mvlgamma", "RreluWithNoise"),
}
STEPS: dict[str, GraphStep] = dict.fromkeys(_BY_ELEMENT, _by_element)
