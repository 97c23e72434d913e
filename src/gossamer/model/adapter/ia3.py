"""(IA)^3: the outputs of some layers, or the inputs of others, times a trained vector (Liu et al. 2022,
https://arxiv.org/abs/2205.05638).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gossamer.model.adapter import Adapter, AdapterTensor, _peft

_KEYS_AND_VALUES = r"(k_proj|v_proj|key|value|c_attn|query_key_value)$"
_DOWN = r"(down_proj|fc2|mlp\.c_proj|dense_4h_to_h|wo|output\.dense)$"
_BOTH = f"{_KEYS_AND_VALUES}|{_DOWN}"  # one pattern: some models have only one of the two


@dataclass(frozen=True)
class Ia3(Adapter):
    """(IA)^3: keys, values and the inner activations of the feedforward layers times a vector each, which starts at 1.

    `feedforward`: patterns of those of the `targets` whose input is scaled, and not their output.
    """

    targets: tuple[str, ...] = (_BOTH,)
    feedforward: tuple[str, ...] = (_DOWN,)

    def config(self, paths: Sequence[str]) -> Any:
        inner = [path for path in paths if any(re.search(pattern, path) for pattern in self.feedforward)]
        return _peft.library().IA3Config(target_modules=list(paths), feedforward_modules=inner, init_ia3_weights=False)

    def draw(self, of: AdapterTensor) -> None:
        nn.init.ones_(of.tensor)
