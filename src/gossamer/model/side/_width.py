"""The widths of tapped outputs, read from a model's structure before anything ran; the first forward checks them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gossamer.spec.errors import bad_input


def widths_of(module: nn.Module, taps: Sequence[str], given: Sequence[int], *, key: str) -> tuple[int, ...]:
    """Return the width of each tap's output: as given (one for all, or one each), or as the structure says.

    Blocks of a model with an embedding have the embedding's width, and any other tap that of the last layer in it.
    Raises BadInput where none is known.
    """
    if given:
        if len(given) not in (1, len(taps)) or min(given) < 1:
            raise bad_input(
                wanted=f"one width, or one for each of the {len(taps)} taps ({', '.join(taps)})",
                got=str(list(given)),
                do="write the last size of what they return",
                key=key,
            )
        return tuple(given) if len(given) == len(taps) else tuple(given) * len(taps)
    known = _residual_width(module)
    found = [known if known is not None else _last_width(module.get_submodule(path)) for path in taps]
    for path, one in zip(taps, found, strict=True):
        if one is None:
            raise bad_input(
                wanted=f"the width of what {path} returns",
                got=f"a {type(module.get_submodule(path)).__name__} without a layer that shows it",
                do="write widths: [...], one for each tap",
                key=key,
            )
    return tuple(one for one in found if one is not None)


def _residual_width(module: nn.Module) -> int | None:
    """Return the width of a model's hidden states as its config or its first embedding says; None if neither does."""
    config = getattr(module, "config", None)
    for name in ("hidden_size", "n_embd", "d_model"):
        size = getattr(config, name, None)
        if isinstance(size, int):
            return size
    first = next((one for one in module.modules() if isinstance(one, nn.Embedding)), None)
    return first.embedding_dim if first is not None else None


def _last_width(module: nn.Module) -> int | None:
    found = None
    for one in module.modules():
        if isinstance(one, nn.Linear):
            found = one.out_features
        elif isinstance(one, nn.modules.conv._ConvNd):
            found = one.out_channels
        elif isinstance(one, nn.LayerNorm):
            found = int(one.normalized_shape[-1])
        elif isinstance(one, nn.modules.batchnorm._BatchNorm):
            found = one.num_features
    return found
