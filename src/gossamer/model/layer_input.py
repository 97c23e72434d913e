"""The input of a call of a linear layer, as hooks are told of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def layer_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the one argument of a linear layer's forward, given by position or by its name."""
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found
