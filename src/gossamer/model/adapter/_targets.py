"""The linear layers that an adapter is put on, found by pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from gossamer.model.quantized_linear import QuantizedLinear, is_conv1d
from gossamer.model.units import block_names
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.suggest import nearest


def targets_of(module: nn.Module, patterns: Sequence[str], *, key: str) -> tuple[str, ...]:
    """Return the paths of the linear layers of `module` in whose path one of the patterns is found.

    Without patterns: all in the repeated blocks. Raises BadInput for a pattern that finds none, with the nearest names.
    """
    linear = {path: inner for path, inner in module.named_modules() if _is_linear(inner)}
    if not linear:
        raise bad_input(
            wanted="a model with linear layers (torch.nn.Linear, or transformers' Conv1D)",
            got=f"none in a {type(module).__name__}",
            do="train the model itself: set model.adapter to none",
            key=key.rpartition(".")[0],
        )
    if not patterns:
        blocks = tuple(f"{name}." for name in block_names(module))
        return tuple(path for path in linear if path.startswith(blocks)) or tuple(linear)
    found: dict[str, None] = {}
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=key) from None
        matched = [path for path in linear if wanted.search(path)]
        if not matched:
            ends = sorted({path.rpartition(".")[2] for path in linear})
            raise BadInput(
                f"no linear layer of this {type(module).__name__} is called {pattern!r}: {nearest(pattern, ends)}",
                key=key,
            )
        found |= dict.fromkeys(matched)
    return tuple(path for path in linear if path in found)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, QuantizedLinear)) or is_conv1d(module)
