"""SST: sparse spectral training: of a matrix' singular value decomposition all values and a few pairs of vectors move.

Paper: Zhao et al., Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural Networks, 2024,
arXiv:2405.15481.
Equations, for a matrix W (A, B), m = min(A, B), its mean gradient G, and rate a = lr * lr_scale:
    each round:      W = U diag(s) V^T                       a round has ceil(m / r) iterations
    each iteration:  K = r of the m pairs, without replacement, by p_i = (1 / m + s_i / sum s) / 2
    each step:       s   <- max(0, Adam(s, diag(U^T G V)) (1 - a weight_decay))
                     U_K <- normalized(Adam(U_K, T(G V_K))),   V_K <- normalized(Adam(V_K, T(G^T U_K)))
                     W   <- U diag(s) V^T
Symbols: U (A, m) `left`, V (B, m) `right`, s (m,) `values`; r = `rank`, at most m; K `active`; T(g) = g - u (u . g)
column by column, the part of a gradient that turns a unit vector u. The gradient of U is "enhanced": without the factor
s, so that vectors of small singular values learn too. An iteration has `interval` steps, of which the first `warmup`
raise the rate of vectors from 0. Their moments begin at each iteration, those of s at each round.
State:   moments 8 (m + r (A + B)) bytes; U, V and s 4 m (A + B + 1), which the paper holds in place of W. Tensors that
do not have A rows are stored in A rows, the last one filled up.   Work: 2 A B (2 m + r) flop a step; an SVD a round.
K follows from (seed, name, iteration) and s alone, so all ranks draw the same. Ranks on unlike processors may round an
SVD differently: with plan.sharding {zero1: {whole: true}} each matrix is decomposed on one rank.
Good when: moments are what memory lacks.   Not for: embeddings, heads, norms and biases, which `rest` moves.
Unlike the paper: W stays a plain matrix of the model (export and pipeline stages see nothing else), so its whole
gradient is made and exchanged; the paper's layers make those of U_K, V_K and s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from gossamer.ops.splitmix import outputs
from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.optimizer._matrices import MatrixOptimizer
from gossamer.optimizer._patterns import check_patterns
from gossamer.optimizer.adamw import AdamW
from gossamer.spec.errors import bad_input
from gossamer.spec.validate import below_one, not_negative, positive

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sst(MatrixOptimizer):
    """Sparse spectral training of matrices, and `rest` for every other parameter, with a rate of its own.

    `rank`: pairs of singular vectors that move at a time. `matrices`: regular expressions of the names of matrices;
    empty: every parameter of two dimensions whose name does not look like that of an embedding, a head, a router or an
    adapter.
    """

    lr: float = 1e-3
    rank: int = 64
    interval: int = 200
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    seed: int = 0
    matrices: tuple[str, ...] = ()
    rest: Optimizer = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        for name in ("lr", "rank", "interval", "eps"):
            positive(name, getattr(self, name))
        for name in ("warmup", "weight_decay"):
            not_negative(name, getattr(self, name))
        for beta in self.betas:
            below_one("betas", beta)
        check_patterns(self.matrices, "matrices")
        rest = self.rest
        if isinstance(rest, Sst) or rest.has_one_clip or rest.has_average or rest.mask is not None or rest.keeps_masks:
            do = "leave `rest` out: it is adamw"
            got = type(rest).__name__
            raise bad_input(wanted="an optimizer of single parameters at one point", got=got, do=do, key="rest")

    @property
    def slots(self) -> tuple[str, ...]:
        return (*self.rest.slots, *_shapes((1, 1), 1))

    @property
    def owns_weights(self) -> bool:
        return True

    def matrix_slots(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Return zeros: the first update decomposes the matrix as it is then."""
        return {
            slot: rows.new_zeros(rows.shape[0], _columns(own, shape[0]), dtype=_wide(rows.dtype))
            for slot, own in _shapes(shape, self.rank).items()
        }

    def flop(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the floating-point operations of the matmuls in one update, without decompositions."""
        found = 0.0
        for name, shape in shapes.items():
            if self.is_matrix(name, len(shape)):
                found += 2.0 * prod(shape) * (2 * min(shape) + min(self.rank, *shape))
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
        for name, held in matrices.items():
            param, grad = held.detach(), grads[name]
            wide = grad.to(_wide(param.dtype)).contiguous()
            moved = self._stepped(name, param, wide, state[name], rate=self.lr * lr_scale, step=step)
            if lr_scale:
                param.copy_(moved)

    def _stepped(
        self, name: str, param: Tensor, grad: Tensor, slots: Mapping[str, Tensor], *, rate: float, step: int
    ) -> Tensor:
        """Return the matrix after a step of its decomposition, which is updated in its slots."""
        here = _Decomposition.of(slots, tuple(param.shape), self.rank)
        in_round = step % (self.interval * here.iterations)
        if not in_round or not bool(here["left"].any()):  # fresh states may begin at any step
            here.decompose(param)
        in_iteration = step % self.interval
        if not in_iteration or not bool(here["active_pairs"].any()):
            here.begin(drawn(chances(here["values"]), here.rank, (self.seed, name, step // self.interval)))
        warm = min(1.0, (in_iteration + 1) / self.warmup) if self.warmup else 1.0
        active, values = here.active, here["values"]
        left, right = here["left"], here["right"]
        turned = grad @ right  # (A, m)
        of_values = (left * turned).sum(0)
        u, v = left[:, active], right[:, active]
        of_u, of_v = tangent(u, turned[:, active]), tangent(v, grad.t() @ u)
        self._adam(values, of_values, here, "values", rate, in_round)
        values.mul_(1 - rate * self.weight_decay).clamp_(min=0)
        for side, vectors, its in (("left", u, of_u), ("right", v, of_v)):
            self._adam(vectors, its, here, side, rate * warm, in_iteration)
            here[side][:, active] = vectors / vectors.norm(dim=0).clamp(min=self.eps)
        return (here["left"] * values) @ here["right"].t()

    def _adam(self, x: Tensor, grad: Tensor, here: _Decomposition, which: str, rate: float, count: int) -> None:
        b1, b2 = self.betas
        mean, square = here[f"{which}_mean"], here[f"{which}_square"]
        mean.lerp_(grad, 1 - b1)
        square.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        below = (square / (1 - b2 ** (count + 1))).sqrt_().add_(self.eps)
        x.addcdiv_(mean, below, value=-rate / (1 - b1 ** (count + 1)))


@dataclass(frozen=True, slots=True)
class _Decomposition:
    """The decomposition of one matrix in its own shapes, each a view of its slot."""

    held: dict[str, Tensor]
    rank: int
    iterations: int  # of a round

    @staticmethod
    def of(slots: Mapping[str, Tensor], shape: tuple[int, ...], rank: int) -> _Decomposition:
        held = {slot: slots[slot].view(-1)[: prod(own)].view(own) for slot, own in _shapes(shape, rank).items()}
        rank = min(rank, *shape)
        return _Decomposition(held, rank, -(-min(shape) // rank))

    def __getitem__(self, slot: str) -> Tensor:
        return self.held[slot]

    @property
    def active(self) -> Tensor:
        """Return the pairs that move, (r,) int64; slots hold their numbers from 1 on, so that 0 is none."""
        return self["active_pairs"].long() - 1

    def decompose(self, matrix: Tensor) -> None:
        """Take the singular value decomposition of a matrix, and forget all moments and the pairs that moved."""
        left, values, right = torch.linalg.svd(matrix.to(self["left"].dtype).contiguous(), full_matrices=False)
        for one in self.held.values():
            one.zero_()
        self["left"].copy_(left)
        self["values"].copy_(values)
        self["right"].copy_(right.t())

    def begin(self, active: Tensor) -> None:
        """Let other pairs move, from empty moments."""
        self["active_pairs"].copy_(active + 1)
        for slot in ("left_mean", "left_square", "right_mean", "right_square"):
            self[slot].zero_()


def _shapes(shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the own shapes of the tensors of a matrix (A, B), by slot."""
    rows, columns = shape
    most = min(rows, columns)
    r = min(rank, most)
    return {
        "left": (rows, most),
        "right": (columns, most),
        "values": (most,),
        "active_pairs": (r,),
        **{f"values_{moment}": (most,) for moment in ("mean", "square")},
        **{f"left_{moment}": (rows, r) for moment in ("mean", "square")},
        **{f"right_{moment}": (columns, r) for moment in ("mean", "square")},
    }


def _columns(own: tuple[int, ...], rows: int) -> int:
    """Return how many numbers a row holds of a tensor that is stored in `rows` rows."""
    return -(-prod(own) // rows) if rows else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def tangent(units: Tensor, grads: Tensor) -> Tensor:
    """Return the part of gradients (d, r) that turns the unit columns of `units`, without that along them."""
    return grads - units * (units * grads).sum(0)


def chances(values: Tensor) -> Tensor:
    """Return the chance of each pair to be drawn first, (m,): half of it the same for all, half by singular value."""
    wide = values.double().cpu()
    total = wide.sum()
    share = wide / total if total > 0 else torch.full_like(wide, 1 / len(wide))
    return (1 / len(wide) + share) / 2


def drawn(chance: Tensor, count: int, key: tuple[int, str, int]) -> Tensor:
    """Return `count` distinct indices, ascending, drawn one after the other by `chance` among those that are left.

    The same for the same key = (seed, name, iteration): the largest of log chance + Gumbel noise.
    """
    seed = int.from_bytes(hashlib.blake2b(repr(("sst", *key)).encode(), digest_size=8).digest(), "big")
    uniform = (outputs(seed, 0, len(chance), _CPU) >> 11).double().add_(2**52 + 0.5).mul_(2**-53)
    return (chance.log() - (-uniform.log()).log()).topk(count).indices.sort().values
