"""Models and data that a rank and its companion process both build, for the tests of adversarial training ahead."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn
from torch.utils.data import Dataset


class Images(Dataset):
    """Small images of three classes."""

    def __init__(self, count: int = 64, *, draws: bool = False, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.images = torch.randn(count, 1, 6, 6, generator=generator) + self.labels[:, None, None, None]
        self.draws, self.bad = draws, bad

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(()) if self.draws else float("nan") if index == self.bad else 0.0
        return {"image": self.images[index] + noise, "labels": self.labels[index]}


class Net(nn.Module):
    """Batch normalization, dropout, a frozen layer, and a buffer of its own that its output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.fixed, self.head = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)
        self.fixed.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.fixed(self.drop(torch.relu(self.norm(self.conv(image))))).mean((2, 3)) + self.shift
        if self.training:
            self.shift += 0.1 * x.detach().mean(0)
        return self.head(x)


class Counting(Net):
    """A model that counts its forwards in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(image)


class Fragile(Net):
    """A model that ends a companion's process, or fails in it, at the third forward."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            if self.seen > 2 and "gossamer.run.companion_process" in _command():
                _FAULTS[self.fault]()
        return super().forward(image)


def _command() -> str:
    with open("/proc/self/cmdline", "rb") as file:
        return file.read().decode()


def _fail() -> None:
    raise ArithmeticError("a companion's own")


_FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "failed": _fail,
}


def images() -> Images:
    return Images()


def net() -> Net:
    return Net()


def counting() -> Counting:
    return Counting()


def fragile(fault: str) -> Fragile:
    return Fragile(fault)


def unlike() -> Net:
    """A model with weights of another shape in a companion."""
    made = Net()
    if "gossamer.run.companion_process" in _command():
        made.head = nn.Linear(5, 3)
    return made


def other() -> Net:
    """A model with another dropout in a companion."""
    made = Net()
    if "gossamer.run.companion_process" in _command():
        made.drop.p = 0.6
    return made
