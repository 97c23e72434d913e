"""Model outputs: find the loss or the logits in what a forward returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input


def loss_of(output: Any) -> Tensor | None:
    """Return the loss that the model itself computed, () float32; None where it computed none."""
    found = _named(output, "loss")
    if found is None:
        first = _first(output)
        found = first if isinstance(first, Tensor) and first.numel() == 1 and first.ndim <= 1 else None
    return None if found is None else found.float().reshape(())


def logits_of(output: Any, *, dims: int, shape: str) -> Tensor:
    """Return the logits, which must have `dims` dimensions. Raise BadInput that names what came instead of `shape`."""
    found = _named(output, "logits")
    if found is None:
        found = _first(output)
    if isinstance(found, Tensor) and found.ndim == dims:
        return found
    raise bad_input(
        wanted=f"a model whose forward returns a loss (a scalar) or logits {shape}, alone, first in a tuple, or as a "
        "key or attribute named loss or logits",
        got=describe(output),
        do="return one of these from forward, or set model.factory to a function that returns a wrapper of the model",
        key="model",
    )


def token_logits(output: Any, tokens: Tensor, what: str) -> Tensor:
    """Return the logits (batch, sequence, vocabulary), a row for each of `tokens` (batch, sequence), called `what`.

    Raises BadInput for other shapes.
    """
    logits = logits_of(output, dims=3, shape=(shape := "(batch, sequence, vocabulary)"))
    if logits.shape[:2] != tokens.shape:
        raise bad_input(
            wanted=f"logits {shape} for {what} {tuple(tokens.shape)}",
            got=f"{tuple(logits.shape)}",
            do="return one row of logits per input token",
            key="model",
        )
    return logits


def check_no_terms(output: Any) -> None:
    """Raise BadInput for the output of a model with loss terms of its own, which a loss of logits alone would drop."""
    if _named(output, "aux_loss") is not None:
        raise own_terms("an output with aux_loss")


def own_terms(got: str) -> BadInput:
    """Return the error for a model that adds terms to the labels' loss. `got`: how that was seen."""
    return bad_input(
        wanted="a model whose own loss is the cross-entropy alone, as this loss reads its logits and would drop the "
        "rest (the balance of experts)",
        got=got,
        do="set output_router_logits: false in model.config, or train.loss next_token",
        key="train.loss",
    )


def describe(output: Any) -> str:
    """Return a description of a forward's output for an error message: types, names and shapes."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        inside = ", ".join(f"{k}: {describe(v)}" for k, v in output.items())
        return f"{type(output).__name__}({inside})"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of ({', '.join(describe(v) for v in output)})"
    return f"an object of type {type(output).__name__}"


def _named(output: Any, name: str) -> Tensor | None:
    """`output[name]`, or `output.name` of the user's own output classes; also of a tuple's first element."""
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return _named(output[0], name) if output else None
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output
