"""Whether arguments fit what is called: where they do not, Python says so before anything of it has run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gossamer.model.unit_seeds import Keyed


def signature_of(real: Callable[..., Any]) -> inspect.Signature | None:
    """Of the code that gets the arguments, though something else may be written under its name; None: unknown."""
    while isinstance(real, Keyed):
        real = real.real
    try:
        return inspect.signature(getattr(real, "_torchdynamo_orig_callable", real), follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def fits(real: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether it can be called so."""
    if (signature := signature_of(real)) is None:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
