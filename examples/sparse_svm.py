"""Find the few features that matter: a linear classifier with a sparse penalty, by consensus ADMM.

python sparse_svm.py [FILE.csv]                           compare penalties; without FILE, rows are made and written
torchrun --nproc-per-node 2 sparse_svm.py [FILE.csv]      every process holds a part of the rows: the same weights

Problem: min over w, b of  (1/n) sum_i max(0, 1 - y_i (x_i w + b)) + sum_j P(w_j)
ADMM with xi_i = 1 - y_i (x_i w + b) and s = w, A the rows y_i (x_i, 1), D the identity without b, r and q its weights:
    (w, b) <- (r A'A + q D)^-1 (r A'(1 - xi - u) + q D (s - v))
    xi <- prox of the hinge ;  s <- prox of P ;  u += xi + A (w, b) - 1 ;  v += w - s
A process sends A'A once and a vector per iteration, never a row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.optimizer import proximal_operator
from gossamer.optimizer.proximal_operator import ProximalOperator

FEATURES, TRUE = 200, 5
PENALTIES = ("l1", "scad", "mcp", "capped_l1")


@dataclass(frozen=True)
class Fit:
    """A classifier: weights of which some are exactly 0, the intercept, and how far ADMM's two copies are apart."""

    weights: Tensor
    intercept: float
    residual: float

    @property
    def features(self) -> list[int]:
        return [int(j) for j in self.weights.nonzero().flatten()]

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        return float(((x @ self.weights + self.intercept).sign() == y).double().mean())


def alone(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


def over_all(x: Tensor) -> Tensor:
    """The sum over the processes of torchrun."""
    dist.all_reduce(x)
    return x


def fit(
    x: Tensor,
    y: Tensor,
    penalty: ProximalOperator | None,
    *,
    total: Callable[[Tensor], Tensor] = alone,
    iterations: int = 3000,
    r: float = 0.02,
    q: float = 1.0,
) -> Fit:
    """Train on this process's rows `x` (n, features) with labels `y` of -1 and 1; `total` adds over all processes."""
    rows = y[:, None] * torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    count = float(total(torch.tensor(float(len(x)), dtype=x.dtype)))
    free = torch.ones(rows.shape[1], dtype=x.dtype)
    free[-1] = 0.0  # the intercept has no penalty
    factor = torch.linalg.cholesky(r * total(rows.T @ rows) + q * torch.diag(free))
    xi, u = torch.zeros(len(x), dtype=x.dtype), torch.zeros(len(x), dtype=x.dtype)
    s, v = torch.zeros_like(free), torch.zeros_like(free)
    most = 1 / (count * r)
    for _ in range(iterations):
        right = r * total(rows.T @ (1 - xi - u)) + q * free * (s - v)
        theta = torch.cholesky_solve(right[:, None], factor)[:, 0]
        margin = rows @ theta
        at = 1 - margin - u
        xi = at - at.clamp(0, most)
        moved = free * (theta + v)
        s = moved if penalty is None else penalty.prox(moved, 1 / q)
        u = u + xi + margin - 1
        v = free * (v + theta - s)
    return Fit(s[:-1], float(theta[-1]), float((free * (theta - s)).abs().max()))


def make(rows: int, seed: int) -> Tensor:
    """Rows of a label and 200 features, of which the first 5 decide; one label in 25 is wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    truth = torch.tensor([2.0, -1.5, 1.0, -1.0, 1.5], dtype=torch.float64)
    y = (x[:, :TRUE] @ truth).sign()
    y[torch.rand(rows, generator=generator) < 0.04] *= -1
    return torch.cat([y[:, None], x], 1)


def write(file: Path, table: Tensor) -> None:
    file.write_text("\n".join(",".join(f"{value:.6g}" for value in row) for row in table.tolist()) + "\n", "utf-8")


def read(file: Path) -> tuple[Tensor, Tensor]:
    """Features and labels of a file with a label of -1 or 1 in the first column."""
    table = torch.tensor([[float(v) for v in line.split(",")] for line in file.read_text("utf-8").splitlines()])
    return table[:, 1:].double(), table[:, 0].double()


def bias(found: Fit, oracle: Fit) -> float:
    """How far the weights of the true features are from those fitted without a penalty to these features alone."""
    return float((found.weights[:TRUE] - oracle.weights).norm() / oracle.weights.norm())


def main() -> None:
    torch.set_num_threads(1)
    is_divided = "RANK" in os.environ
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if is_divided:
        dist.init_process_group("gloo")
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("sparse_svm.csv")
    if not file.exists() and rank == 0:
        write(file, make(600, seed=1))
    if is_divided:
        dist.barrier()
    x, y = read(file)
    train, test = slice(rank, 300, ranks), slice(300, None)
    total = over_all if is_divided else alone
    oracle = fit(x[train, :TRUE], y[train], None, total=total)
    for name in PENALTIES:
        penalty = proximal_operator.build({name: {"strength": 0.08, **({"cap": 0.2} if name == "capped_l1" else {})}})
        found = fit(x[train], y[train], penalty, total=total)
        if rank == 0:
            print(
                f"{name:10} {len(found.features):3} features  accuracy {found.accuracy(x[test], y[test]):.3f}  "
                f"bias {bias(found, oracle):.3f}  weights {found.weights[:TRUE].tolist()}"
            )
    if is_divided:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
