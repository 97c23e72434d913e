"""SHERL: UniPT that counts redundant blocks once, before the last blocks of the model (Diao et al. 2024).

Paper: Diao, Wan, Jia, Zhuge, Zhang, Lu, Chen: SHERL, ECCV 2024, arXiv:2407.07523.
Equations: those of `_aggregation`, with a vector a_i per tap and R_i = sum_j ReLU(cos(f_i, f_j)) (early route). The
    corrected feature then runs through the last `late` blocks, the only ones that keep a graph (late route).
State: as UniPT on N - late taps, and (N - late - 1) k for the a_i.
Saved for backward: as UniPT, and what `late` frozen blocks keep.
Unlike the paper: the tokens of a causal language model are read as `tokens` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.model.side import KEY, SideNetwork
from gossamer.model.side._aggregation import Aggregation
from gossamer.spec.errors import bad_input


@dataclass(frozen=True)
class Sherl(SideNetwork):
    """SHERL. `late`: the last blocks, which the corrected feature runs through with a graph."""

    reduction: int = 8
    late: int = 1
    tokens: str = "auto"
    taps: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.check()
        if self.late < 1:
            raise bad_input(
                wanted="at least 1 late block", got=str(self.late), do="write 1, or use unipt, which has none", key=KEY
            )

    @property
    def keeps(self) -> int:
        return self.late

    def aggregation(self, widths: Sequence[int], width: int) -> Aggregation:
        return Aggregation(widths, width, guided=True, redundancy=True)
