"""Handwritten digits in halves that share nothing, for classes that come in turn.

The 1,797 images of 8 x 8 are scikit-learn's; its file is read, not its code. Each half has a test part of a quarter.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gossamer.spec.errors import BadInput

HALVES = ("digits, first half", "digits, second half")
CLASSES, PIXELS = 10, 64


@dataclass(frozen=True, slots=True)
class Digits:
    """Inputs (rows, 64) in [0, 1] and labels, to train on and to test with."""

    inputs: Tensor
    labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    def of(self, classes: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.isin(self.labels, torch.tensor(classes))
        return self.inputs[rows], self.labels[rows]


@cache
def digits(name: str) -> Digits:
    """Return a half. Raises BadInput where scikit-learn is not installed."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise BadInput("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    lines = gzip.decompress(file.read_bytes()).decode().split()
    table = torch.tensor([[float(cell) for cell in line.split(",")] for line in lines])
    middle = len(table) // 2
    half = table[:middle] if name == HALVES[0] else table[middle:]
    is_test = torch.arange(len(half)) % 4 == 3
    inputs, labels = half[:, :-1] / 16, half[:, -1].long()
    return Digits(inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test])


def digest(name: str) -> str:
    return hashlib.sha256(digits(name).inputs.numpy().tobytes()).hexdigest()[:16]


def turns(seed: int, size: int) -> list[list[int]]:
    """Return the classes in an order of the seed, `size` of them at a time."""
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[at : at + size] for at in range(0, CLASSES, size)]


def error(logits: Tensor, labels: Tensor) -> float:
    """Return the fraction that is wrong, of all classes."""
    return float((logits.argmax(1) != labels).float().mean())
