"""Check of arguments against a signature: Python raises TypeError for a misfit before any code of the callee runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.model.unit_seeds import Keyed


def signature_of(real: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of the code that gets the arguments, below the wrappers of units; None if unknown."""
    while isinstance(real, Keyed):
        real = real.real
    try:
        return inspect.signature(getattr(real, "_torchdynamo_orig_callable", real), follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def fits(real: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether `real` can be called with these arguments; True if its signature is unknown."""
    if (signature := signature_of(real)) is None:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
