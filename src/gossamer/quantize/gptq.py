"""GPTQ: round column after column, and let the columns that are left make up for the error on calibration inputs.

Paper: Frantar, Ashkboos, Hoefler, Alistarh, ICLR 2023, arXiv:2210.17323 (algorithm 1).
Equations, for W (out, in) and H = sum x x^T + d mean(diag H) I, U the upper Cholesky factor of H^-1 (U^T U = H^-1):
    for column i:   q_i = nearest(W_i),   e = (W_i - q_i) / U_ii,   W_j <- W_j - e U_ij  for j > i
which minimizes, one column at a time, |W X - W' X|^2 = sum over rows of (w - w') H (w - w')^T.
Columns are taken in blocks, at whose end the columns behind are updated at once. A group's grid is that of its weights
when its first column is reached (`order` given), or of the weights as they were (`order` activation, which takes the
columns by falling mean square of their input, while neighbors share a grid).
Work: in^3 + out in^2 flop.   Memory: four matrices of (in, in) in float64, with the moments.
Unlike the paper: a row that its updates made worse on the calibration inputs than rounding to nearest is rounded to
nearest, so that no row is; an input that is always zero (a dead one) keeps its weights rounded to nearest, where the
paper sets them to zero; where the factor does not exist, the damping d grows tenfold, up to 1. What was done is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.quantize import EncodedWeight, Quantizer
from gossamer.spec.errors import bad_input

_MOST_DAMPING = 1.0


@dataclass(frozen=True)
class Gptq(Quantizer):
    """GPTQ. `damping`: d above; `block`: columns that are updated at once."""

    bits: int = 4
    group: int = 64
    symmetric: bool = False
    damping: float = 0.01
    order: Literal["given", "activation"] = "given"
    block: int = 128
    needs_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert self.format  # raises BadInput for what the format lacks
        if not 0 < self.damping <= _MOST_DAMPING:
            raise bad_input(wanted="a damping in (0, 1]", got=f"{self.damping:g}", do="leave it at 0.01", key="damping")
        if self.block < 1:
            raise bad_input(wanted="blocks of columns", got=str(self.block), do="leave it at 128", key="block")

    def encode(self, weight: Tensor, moments: Tensor | None) -> EncodedWeight:
        exact = weight.detach().float()
        plain = self.format.encode(exact)
        if moments is None:
            return EncodedWeight(blocks=plain, said="no calibration input reached it: rounded to nearest")
        hessian = moments.double()
        if not bool(hessian.isfinite().all()):
            raise bad_input(
                wanted="finite calibration inputs of the layer",
                got="inputs that are infinite or not a number",
                do="check the model and the text: gossamer eval",
            )
        dead = hessian.diagonal() == 0
        if bool(dead.all()):
            return EncodedWeight(blocks=plain, said="all its calibration inputs are zero: rounded to nearest")
        columns = exact.shape[1]
        order = torch.arange(columns, device=exact.device)
        if self.order == "activation":
            order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        factor, damping = self._factor(hessian, dead, order)
        codes, scales = self._codes(exact, factor, order)
        format = self.format
        before = _row_errors(exact - format.decode(plain, columns), hessian)
        made = format.decode(format.pack(codes, scales), columns)
        worse = ~(_row_errors(exact - made, hessian) <= before)
        assert plain.scales is not None
        codes = torch.where(worse.unsqueeze(1), format.codes(plain)[:, :columns], codes)
        scales = torch.where(worse.view(-1, 1, 1), plain.scales, scales)
        return EncodedWeight(
            blocks=format.pack(codes, scales), said=_told(int(dead.sum()), int(worse.sum()), damping, self.damping)
        )

    def _factor(self, hessian: Tensor, dead: Tensor, order: Tensor) -> tuple[Tensor, float]:
        """Return the factor U in float32 for columns in this order, and the damping that it took."""
        mean = hessian.diagonal().mean()
        damping = self.damping
        while damping <= _MOST_DAMPING:
            factor = hessian.clone() if self.order == "given" else hessian[order][:, order]
            factor.diagonal().add_(damping * mean)
            factor.diagonal()[dead[order]] = mean
            factor, failed = torch.linalg.cholesky_ex(factor)  # one name, so that none of them outlives its use
            if not bool(failed):
                factor = torch.cholesky_inverse(factor)
                factor, failed = torch.linalg.cholesky_ex(factor, upper=True)
                if not bool(failed) and bool(factor.isfinite().all()):
                    return factor.float(), damping
            damping *= 10
        raise bad_input(
            wanted="calibration inputs whose second moments, with damping, are positive definite",
            got=f"none up to a damping of {_MOST_DAMPING:g}",
            do="give other calibration text (data), or use round_to_nearest",
        )

    def _codes(self, exact: Tensor, factor: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (out, in) and the scales (out, groups, 1 or 2)."""
        format, columns = self.format, exact.shape[1]
        width = format.width(columns)
        is_given = self.order == "given" and width < columns
        first = format.encode(exact)
        assert first.scales is not None
        scales = first.scales.clone()
        left = exact[:, order].clone()
        codes = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device)
        block = max(1, self.block // width) * width if is_given else self.block  # a group lies in one block
        places = order.tolist()
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            part, upper = left[:, start:stop], factor[start:stop, start:stop]
            errors = torch.empty_like(part)
            for i in range(stop - start):
                place = places[start + i]
                group = place // width
                if is_given and place % width == 0:
                    scales[:, group] = format.grid(part[:, i : i + width])
                grid = scales[:, group]
                code = format.nearest(part[:, i], grid)
                codes[:, place] = code
                errors[:, i] = (part[:, i] - format.values(code, grid)) / upper[i, i]
                part[:, i + 1 :] -= torch.outer(errors[:, i], upper[i, i + 1 :])
            left[:, stop:] -= errors @ factor[start:stop, stop:]
        return codes, scales


def _row_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """Return (w - w') H (w - w')^T of every row."""
    apart = difference.double()
    return ((apart @ hessian) * apart).sum(1)


def _told(dead: int, worse: int, damping: float, wanted: float) -> str:
    said = []
    if dead:
        said.append(f"{dead} inputs are always zero")
    if worse:
        said.append(f"{worse} rows rounded to nearest, which is better for them")
    if damping != wanted:
        said.append(f"damping raised to {damping:g}")
    return ", ".join(said)
