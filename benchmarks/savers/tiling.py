"""Linear layers in tiles: the copies of weights in bfloat16, and of their gradients, of one tile and not of a layer.

A Llama whose two widest layers take most of the memory, with few tokens; the peaks are those of the rows of recompute.
"""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.model.source.hf import Hf
from savers import Row
from savers.recompute import measured

_LLAMA = Hf(
    "llama",
    {
        "hidden_size": 384,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
)
_NAME = "tiling"


def rows(*, quick: bool = False) -> Iterator[Row]:
    """Rows of plain training, and of 4 and 16 tiles of the layers of 4 MiB or more."""
    steps = 2 if quick else 5
    yield measured([], "plain training", steps, peer="plain", method=_NAME, model=_LLAMA, precision="bf16")
    for tiles in (4, 16):
        saver = {_NAME: {"tiles": tiles, "least": "4MiB"}}
        yield measured([saver], f"{tiles} tiles", steps, method=_NAME, model=_LLAMA, precision="bf16")
