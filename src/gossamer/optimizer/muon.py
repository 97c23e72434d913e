"""Muon: every matrix moves by the orthogonal factor of its momentum; all other parameters follow another optimizer.

Paper: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the scale `match_rms`: Liu et al. 2025,
arXiv:2502.16982 (Moonlight). The reference is torch.optim.Muon.
Equations, for a matrix W (A, B) and rate a = lr * lr_scale:
    m <- u m + (1 - u) g ;   n = (1 - u) g + u m  with `nesterov`, else m
    x = n / |n|_F ;   `iterations` times:  x <- p x + (q y + r y^2) x,  y = x x^T
    w <- w (1 - a weight_decay) - a s x
    s = 0.2 sqrt(max(A, B)) (`match_rms`: steps as long as AdamW's, whose rates carry over)
    s = sqrt(max(1, A / B)) (`original`)
Symbols: g gradient, m `momentum` (state), u momentum, |.|_F the Frobenius norm; (p, q, r) = (3.4445, -4.775, 2.0315),
with which singular values of x above 0.05 end between 0.6 and 1.25. x x^T is taken on the shorter side.
State:   1 tensor per matrix; that of `rest` for the others.   Work: (4 A^2 B + 2 A^3) flop an iteration, A the shorter
side: with few tokens in a step as much as the step itself.
Good when: batches are large and matrices too.   Not for: embeddings, heads, routers, norms and biases, which `rest`
moves: two dimensions do not tell a matrix from these, names do.
Unlike torch: iterations in float32 unless `dtype` says bfloat16 (faster on GPUs, and then bit for bit torch's).
Fused projections are orthogonalized part by part (`fused`), since one block would dominate the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._matrices import MatrixOptimizer
from gossamer.optimizer._patterns import check_patterns
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, not_negative, positive

_P, _Q, _R = 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7
_FUSED: tuple[tuple[str, int | tuple[int, ...], int], ...] = (
    (r"\bc_attn\.weight$", 3, 1),
    (r"\b(in_proj_weight|(qkv|Wqkv|qkv_proj)\.weight)$", 3, 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(MatrixOptimizer):
    """Orthogonalized momentum for matrices, and `rest` for every other parameter, with a rate of its own.

    `matrices`: regular expressions of the names of matrices; empty: every parameter of two dimensions whose name does
    not look like that of an embedding, a head, a router or an adapter. `fused`: (regular expression, parts, dimension)
    of projections that are one matrix and several in truth; parts: their number, or how large they are in proportion,
    such as [4, 1, 1] for 4 query heads to a key-value head. A parameter follows the first pattern found in its name.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    scale: Literal["match_rms", "original"] = "match_rms"
    iterations: int = 5
    dtype: Literal["float32", "bfloat16"] = "float32"
    matrices: tuple[str, ...] = ()
    fused: tuple[tuple[str, int | tuple[int, ...], int], ...] = _FUSED
    rest: Optimizer = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        below_one("momentum", self.momentum)
        not_negative("weight_decay", self.weight_decay)
        positive("iterations", self.iterations)
        if isinstance(self.rest, Muon):
            raise bad_input(wanted="another optimizer", got="muon", do="leave `rest` out: it is adamw", key="rest")
        if self.rest.has_one_clip:
            do = "choose another optimizer for `rest`, or this one for all parameters"
            got = "one that moves all parameters under one clip"
            raise bad_input(wanted="an optimizer of single parameters", got=got, do=do, key="rest")
        if self.rest.mask is not None or self.rest.keeps_masks:
            do = "write {static_mask: {inner: muon}}, which masks the matrices"
            raise bad_input(wanted="an optimizer without a mask", got="static_mask", do=do, key="rest")
        if self.rest.has_average:
            do = "choose another optimizer for `rest`, or this one for all parameters"
            got = "one with an averaged point, which matrices have not"
            raise bad_input(wanted="an optimizer that is evaluated at its parameters", got=got, do=do, key="rest")
        check_patterns((*self.matrices, *(one for one, _, _ in self.fused)), "matrices")
        for pattern, parts, dim in self.fused:
            if min(_proportions(parts), default=0) < 1 or dim not in (0, 1):
                do = "write [pattern, parts, dimension] such as [qkv, 3, 0]"
                raise bad_input(
                    wanted=f"parts >= 1 along dimension 0 or 1 for {pattern!r}", got=f"{parts}, {dim}", do=do
                )

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.rest.slots, "momentum") if "momentum" not in self.rest.slots else self.rest.slots

    def matrix_slots(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        self._sizes(name, shape)
        return {"momentum": torch.zeros_like(rows, memory_format=torch.contiguous_format).detach()}

    def flop(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the floating-point operations of the iterations in one update of parameters with these shapes."""
        found = 0.0
        for name, shape in shapes.items():
            if self.is_matrix(name, len(shape)):
                sizes, dim = self._sizes(name, shape)
                for size in sizes:
                    short, long = sorted((size, shape[1 - dim]))
                    found += self.iterations * (4.0 * short * short * long + 2.0 * short**3)
        return found

    def move(
        self,
        matrices: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        rate = self.lr * lr_scale
        for name, param in matrices.items():
            grad, held = grads[name].to(param.dtype).contiguous(), state[name]["momentum"]
            held.lerp_(grad, 1 - self.momentum)
            moved = grad.lerp(held, self.momentum) if self.nesterov else held
            param.detach().mul_(1 - rate * self.weight_decay)
            sizes, dim = self._sizes(name, tuple(moved.shape))
            for mine, its in zip(torch.split(param.detach(), sizes, dim), torch.split(moved, sizes, dim), strict=True):
                factor = orthogonalized(its, self.iterations, getattr(torch, self.dtype))
                mine.add_(factor.to(mine.dtype), alpha=-rate * self._length(mine.shape))

    def _length(self, shape: torch.Size) -> float:
        """Return the factor s on an orthogonal factor of this shape."""
        rows, columns = shape
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))

    def _sizes(self, name: str, shape: tuple[int, ...]) -> tuple[list[int], int]:
        """Return the sizes of the parts of the matrix `name`, and along which dimension they lie.

        Raises BadInput where they do not divide it, and, of the parts that are thought of by default, where they need
        not be equal: queries, keys and values are where each has as many outputs as inputs, not with grouped heads.
        """
        parts, dim = next(self._parts_of(name), ((1,), 0))
        unit, rest = divmod(shape[dim], sum(parts))
        is_known = self.fused is not _FUSED or len(parts) == 1 or unit == shape[1 - dim]
        if rest or not is_known:
            told = f"{len(parts)} parts" if len(set(parts)) == 1 else f"parts {list(parts)}"
            square = "" if self.fused is not _FUSED else f", each as large as dimension {1 - dim}"
            raise bad_input(
                wanted=f"a dimension {dim} of {name} that divides by its {told}{square}",
                got=f"the shape {shape}",
                do="set train.optimizer.muon.fused to how this projection is fused, such as [[qkv, [4, 1, 1], 0]] for "
                "4 query heads to a key-value head, or to [] if it is not",
                key="train.optimizer.muon.fused",
            )
        return [unit * part for part in parts], dim

    def _parts_of(self, name: str) -> Iterator[tuple[tuple[int, ...], int]]:
        return ((_proportions(parts), dim) for pattern, parts, dim in self.fused if re.search(pattern, name))


def _proportions(parts: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return how large each part is in proportion; a number of parts is that of equal ones."""
    return (1,) * parts if isinstance(parts, int) else tuple(parts)


def orthogonalized(matrix: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Return the orthogonal factor of a matrix (A, B), roughly: its singular values are between 0.7 and 1.2.

    Computed in `dtype`. A matrix of zeros gives zeros.
    """
    x = matrix.to(dtype)
    is_tall = x.shape[0] > x.shape[1]
    x = x.t() if is_tall else x
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_Q, alpha=_R), x, beta=_P)
    return x.t() if is_tall else x
