"""Terms of parameters alone, such as a penalty on weights: no row of a batch enters them."""

from __future__ import annotations

from typing import Any

from gossamer.loss_reader.graph_nodes import PASSING, below, constant, is_parameter, op_name, saved

_FREE_NODES = 64  # a penalty is few nodes above its parameter
# Operations of penalties on parameters. Any other may bring rows in: a layer, or a function of the user's.
_BY_ELEMENT = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Exp", "Log", "Log1P", "Expm1", "Abs", "Sqrt", "Rsqrt", "Reciprocal", "Sign"),
    *(
        "Sigmoid",
        "LogSigmoid",
        "Tanh",
        "Relu",
        "Softplus",
        "Clamp",
        "ClampMin",
        "ClampMax",
        "Sin",
        "Cos",
        "Stack",
        "Cat",
    ),
    *(
        "Sum",
        "Mean",
        "Norm",
        "LinalgVectorNorm",
        "Max",
        "Min",
        "Maximum",
        "Minimum",
        "Where",
        "Select",
        "Unbind",
        "Slice",
    ),
}


def depends_on_parameters_only(node: Any, sizes: tuple[int, ...] | None) -> bool:
    """Return whether a node depends on parameters alone, each of the reduced sizes, so that no rows entered."""
    todo: list[tuple[Any, tuple[int, ...] | None]] = [(node, sizes)]
    seen = 0
    while todo:
        one, sizes = todo.pop()
        if one is None:
            continue
        seen += 1
        name = op_name(one)
        if seen > _FREE_NODES or name not in (*_BY_ELEMENT, *PASSING, "Mm", "AccumulateGrad"):
            return False
        if name in ("Select", "Unbind", "Slice") and not is_parameter(one.next_functions[0][0]):
            return False
        if name in ("Mul", "Div") and any(
            (given := constant(one, side)) is not None and given.is_computed
            for side, under in zip(("self", "other"), one.next_functions[::-1], strict=False)
            if under[0] is not None
        ):
            return False
        if name == "AccumulateGrad":
            if sizes is not None and tuple(one.variable.shape) != sizes:
                return False
            continue
        if name in ("Norm", "LinalgVectorNorm"):
            sizes = tuple(one._saved_self.shape)
        elif name in ("Sum", "Mean"):
            sizes = tuple(one._saved_self_sym_sizes)
        elif name == "Mm":
            factors = [saved(one, f"{side}_sym_sizes") for side in ("self", "mat2")]
            if None in below(one) or None in factors:
                return False
            todo += zip(below(one), map(tuple, factors), strict=True)
            continue
        elif name in ("T", "Transpose", "Permute") and sizes is not None and len(sizes) == 2:
            sizes = sizes[::-1]
        todo += [(under, sizes) for under in below(one)]
    return seen > 0
