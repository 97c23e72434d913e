"""Metrics as a user writes them."""

from __future__ import annotations

import torch


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The fraction of labels that are the likeliest token."""
    valid = labels != -100
    return ((logits.argmax(-1) == labels) & valid).sum(), valid.sum()


def broken(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    return 1 / 0, 1.0


def no_count(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.sum()
