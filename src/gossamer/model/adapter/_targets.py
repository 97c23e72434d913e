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

    Without patterns: all in the repeated blocks. Raises BadInput for a pattern that finds none, with the nearest names,
    and for a layer that stands in several places.
    """
    linear = {path: inner for path, inner in module.named_modules() if path and _is_linear(inner)}
    if not linear:
        raise bad_input(
            wanted="a model with linear layers (torch.nn.Linear, or transformers' Conv1D)",
            got=f"none inside of a {type(module).__name__}",
            do="train the model itself: set model.adapter to none",
            key=key.rpartition(".")[0],
        )
    if not patterns:
        blocks = tuple(f"{name}." for name in block_names(module))
        inside = tuple(path for path in linear if path.startswith(blocks)) or tuple(linear)
        return _in_one_place(module, inside, key=key)
    found: dict[str, None] = {}
    for pattern in patterns:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise BadInput(f"{pattern!r} is no regular expression: {error}", key=key) from None
        matched = [path for path in linear if wanted.search(path)]
        if not matched:
            _check_not_read(module, wanted, key=key)
            ends = sorted({path.rpartition(".")[2] for path in linear})
            raise BadInput(
                f"no linear layer of this {type(module).__name__} is called {pattern!r}: {nearest(pattern, ends)}",
                key=key,
            )
        found |= dict.fromkeys(matched)
    return _in_one_place(module, tuple(path for path in linear if path in found), key=key)


def _is_linear(module: nn.Module) -> bool:
    return (isinstance(module, (nn.Linear, QuantizedLinear)) and not _is_only_read(module)) or is_conv1d(module)


def _is_only_read(module: nn.Module) -> bool:
    """Return whether a layer's weight is read, and the layer never called: torch's own mark of MultiheadAttention's."""
    return isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _check_not_read(module: nn.Module, wanted: re.Pattern[str], *, key: str) -> None:
    """Raise BadInput where a pattern finds layers on which an adapter would do nothing, and no other."""
    read = [path for path, inner in module.named_modules() if _is_only_read(inner) and wanted.search(path)]
    if read:
        raise bad_input(
            wanted=f"layers that are called, for {wanted.pattern!r}",
            got=f"{read[0]}, of which nn.MultiheadAttention reads the weight alone, so that an adapter does nothing",
            do="name other layers, or train it itself with model.unfreeze",
            key=key,
        )


def _in_one_place(module: nn.Module, paths: tuple[str, ...], *, key: str) -> tuple[str, ...]:
    """Return the paths; raise BadInput for a layer with several of them: peft would adapt one of its uses alone."""
    first: dict[int, str] = {id(module.get_submodule(path)): path for path in paths}
    for path, inner in module.named_modules():
        for name, one in inner._modules.items():
            place = f"{path}.{name}" if path else name
            if (known := first.get(id(one))) is not None and known != place:
                raise bad_input(
                    wanted="layers that stand in one place each, to adapt",
                    got=f"{known}, which is {place} too",
                    do="name other layers with targets, or build the model with two layers that share their weight",
                    key=key,
                )
    return paths
