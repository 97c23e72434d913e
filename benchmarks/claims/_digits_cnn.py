"""A small convolutional network and the digits, which a rank and its companion process build alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grow_shrink._digits import HALVES, digits

SIDE, CLASSES = 8, 10


def parts() -> dict[str, tuple[Tensor, Tensor]]:
    """Images (rows, 1, 8, 8) in [0, 1] and labels by part: a quarter to test, a sixth of the rest to validate."""
    halves = [digits(name) for name in HALVES]
    inputs = torch.cat([half.inputs for half in halves]).view(-1, 1, SIDE, SIDE)
    labels = torch.cat([half.labels for half in halves])
    judged = torch.arange(len(labels)) % 6 == 5
    test = torch.cat([half.test_inputs for half in halves]).view(-1, 1, SIDE, SIDE)
    return {
        "train": (inputs[~judged], labels[~judged]),
        "validation": (inputs[judged], labels[judged]),
        "test": (test, torch.cat([half.test_labels for half in halves])),
    }


class Rows(Dataset[dict[str, Tensor]]):
    """The training part, as often as `copies`."""

    def __init__(self, copies: int = 1) -> None:
        images, labels = parts()["train"]
        self.images, self.labels = images.repeat(copies, 1, 1, 1), labels.repeat(copies)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "labels": self.labels[index]}


class Cnn(nn.Module):
    """Two convolutions with batch normalization, and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(8 * width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).flatten(1))


def net(width: int) -> Cnn:
    return Cnn(width)
