"""LLM-QFA: one quantized model for all budgets: a layer has several bit widths, each with a LoRA of its own.

Paper: Yi et al. 2024, One QuantLLM for ALL: Fine-tuning Quantized LLMs Once for Efficient Deployments,
arXiv:2405.20202.
Equations, for a layer at the width b of a step: y = W_b x + alpha / rank B_b A_b x, with frozen W_b in integers of
`gossamer.model.quantized.packed` (groups of `group`, asymmetric). They are those of the folder `integers`, which
`gossamer quantize BASE --bits 2,3,4 --out FOLDER` wrote (by GPTQ, as in the paper), or rounded to nearest. The widths
of a step's layers follow from (seed, step) (`gossamer.model.bit_widths`): they are equal on all ranks and after a
resume. Adapters of other widths have no gradient in that step and stay as they are. Evaluations in training are at the
largest width.
Memory: the integers of all widths (9 bits a weight for 2, 3 and 4, and their scales), and a LoRA each.
Afterwards `gossamer quantize RUN --budget 2.5 --out DIR` looks for widths of 2.5 bits on average and writes the subnet.
Unlike the paper: without `integers` they are rounded to nearest, as a model is built without text. GPTQ needs text and
an order of layers, so its integers are read on every rank and after a resume, and the run is on the folder as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.model.adapter import KEY, Adapter, AdapterTensor
from gossamer.model.adapter._checks import check_rank
from gossamer.model.bit_widths import BitWidths
from gossamer.model.integer_widths import check_source, layer_integers
from gossamer.model.qfa_linear import QfaLinear
from gossamer.model.quantize_base import put
from gossamer.model.quantized.packed import Packed
from gossamer.model.quantized_linear import weight_of
from gossamer.spec.errors import bad_input
from gossamer.store.integers_folder import IntegersFolder


@dataclass(frozen=True)
class Qfa(Adapter):
    """LLM-QFA. `cycle`: steps in which the average width rises from the smallest to the largest and falls again;
    `integers`: the folder of the frozen integers, made of this model's weights; "": they are rounded to nearest.
    """

    rank: int = 8
    alpha: float = 16.0
    widths: tuple[int, ...] = (2, 3, 4)
    group: int = 64
    cycle: int = 32
    integers: str = ""
    targets: tuple[str, ...] = ()

    replaces_layers = True

    def __post_init__(self) -> None:
        check_rank(self.rank, 0.0)
        for bits in self.widths:
            Packed(bits=bits, group=self.group)
        if len(self.widths) < 2 or list(self.widths) != sorted(set(self.widths)):
            raise bad_input(
                wanted="two or more widths, rising", got=str(list(self.widths)), do="write [2, 3, 4]", key="widths"
            )
        if self.cycle < 2:
            raise bad_input(wanted="a cycle of 2 steps or more", got=str(self.cycle), do="leave it out", key="cycle")

    def config(self, paths: Sequence[str]) -> Any:
        raise AssertionError("its layers are not peft's")

    def replace(self, module: nn.Module, paths: Sequence[str]) -> None:
        sizes = []
        folder = self._folder()
        if folder is not None:
            check_source(folder, module)
        layers = [module.get_submodule(path) for path in paths]
        for path, linear in zip(paths, layers, strict=True):
            sizes.append(weight_of(linear).numel())
            made = QfaLinear(
                linear,
                self.widths,
                group=self.group,
                rank=self.rank,
                scale=self.alpha / self.rank,
                blocks=None if folder is None else layer_integers(folder, path, linear, self.widths, self.group),
            )
            put(module, path, made)
        known = BitWidths(tuple(paths), tuple(sizes), tuple(self.widths), self.cycle)
        for place, path in enumerate(paths):
            layer = module.get_submodule(path)
            assert isinstance(layer, QfaLinear)
            layer.layers, layer.place = known, place

    def files(self) -> Sequence[Path]:
        folder = self._folder()
        return () if folder is None else folder.files()

    def _folder(self) -> IntegersFolder | None:
        return IntegersFolder(Path(self.integers).expanduser(), f"{KEY}.qfa.integers") if self.integers else None

    def draw(self, of: AdapterTensor) -> None:
        if of.slot.startswith("lora_A"):
            nn.init.kaiming_uniform_(of.tensor, a=math.sqrt(5))
        else:
            nn.init.zeros_(of.tensor)
