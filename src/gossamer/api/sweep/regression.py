"""A ridge regression of few rows, with the error that it has on rows it has not seen.

    min_b |y - mean(y) - X b|^2 + r |b|^2
Symbols: X (rows, features) standardized; y (rows,); r the one of a list with the least leave-one-out error.
A. E. Hoerl, R. W. Kennard, Ridge Regression, Technometrics 1970. Unlike AutoDistiller (H. Zhang et al., Distiller,
SustaiNLP 2021), which stacks boosted trees: a sweep has tens of rows, of which trees learn little more than the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_PENALTIES = (0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True, slots=True, eq=False)
class Ridge:
    """A fitted regression."""

    center: Array
    scale: Array
    weights: Array
    level: float

    @staticmethod
    def of(x: Array, y: Array) -> Ridge:
        """Fit to rows x (n, f) and y (n,), n >= 3."""
        errors = [_left_out(x, y, penalty) for penalty in _PENALTIES]
        return _fit(x, y, _PENALTIES[int(np.argmin(errors))])

    def predict(self, x: Array) -> Array:
        """Return the predicted y (k,) of rows x (k, f)."""
        return self.level + (x - self.center) / self.scale @ self.weights


def unseen_errors(x: Array, y: Array) -> tuple[float, float]:
    """Return the root mean squared leave-one-out errors of the regression, and of the mean of the other rows.

    The penalty is chosen anew without the row that is left out. n >= 4.
    """
    ours, means = [], []
    for row in range(len(y)):
        rest = np.arange(len(y)) != row
        ours.append(Ridge.of(x[rest], y[rest]).predict(x[row : row + 1])[0] - y[row])
        means.append(y[rest].mean() - y[row])
    return float(np.sqrt(np.mean(np.square(ours)))), float(np.sqrt(np.mean(np.square(means))))


def _fit(x: Array, y: Array, penalty: float) -> Ridge:
    spread = x.std(0)
    center, scale = x.mean(0), np.where(spread > 0, spread, 1.0)
    rows, level = (x - center) / scale, float(y.mean())
    weights = np.linalg.solve(rows.T @ rows + penalty * np.eye(x.shape[1]), rows.T @ (y - level))
    return Ridge(center, scale, weights, level)


def _left_out(x: Array, y: Array, penalty: float) -> float:
    """Return the sum of squared errors of each row by a fit to the others."""
    found = 0.0
    for row in range(len(y)):
        rest = np.arange(len(y)) != row
        found += float((_fit(x[rest], y[rest], penalty).predict(x[row : row + 1])[0] - y[row]) ** 2)
    return found
