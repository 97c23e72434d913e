"""What stands in for what a script would download, and for packages that only show things: seeded, of the same form."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

ROWS = 4096


class Pictures(Dataset[Any]):
    """Random pictures with labels, through a transform, as torchvision's data sets give them."""

    def __init__(self, *shape: int, rows: int = ROWS, transform: Any = None) -> None:
        draw = torch.Generator().manual_seed(1)
        self.data = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8, generator=draw)
        self.targets = torch.randint(0, 10, (rows,), generator=draw)
        self._transform = transform or (lambda picture: picture)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self.data[index]), int(self.targets[index])


class Compose:
    def __init__(self, steps: list[Any]) -> None:
        self._steps = steps

    def __call__(self, picture: Any) -> Any:
        for step in self._steps:
            picture = step(picture)
        return picture


class ToTensor:
    def __call__(self, picture: Tensor) -> Tensor:
        return picture.to(torch.get_default_dtype()) / 255


class Normalize:
    def __init__(self, mean: Any, std: Any) -> None:
        self._mean, self._std = (torch.tensor(one)[:, None, None] for one in (mean, std))

    def __call__(self, picture: Tensor) -> Tensor:
        return (picture - self._mean) / self._std


def get_training_set(upscale_factor: int) -> TensorDataset:
    """Small pictures and large ones, for super_resolution."""
    draw = torch.Generator().manual_seed(1)
    small = torch.rand(ROWS // 8, 1, 24, 24, generator=draw)
    large = torch.rand(ROWS // 8, 1, 24 * upscale_factor, 24 * upscale_factor, generator=draw)
    return TensorDataset(small, large)


get_test_set = get_training_set


def install() -> None:
    """Put modules in the place of those that are not here or would download."""
    vision = ModuleType("torchvision")
    data, transforms, utils = (ModuleType(f"torchvision.{name}") for name in ("datasets", "transforms", "utils"))

    def mnist(*_: Any, transform: Any = None, **__: Any) -> Pictures:
        return Pictures(1, 28, 28, rows=60_000, transform=transform)

    def cifar(*_: Any, transform: Any = None, **__: Any) -> Pictures:
        return Pictures(3, 32, 32, transform=transform)

    def fake(*_: Any, image_size: tuple[int, ...], transform: Any = None, **__: Any) -> Pictures:
        return Pictures(*image_size, transform=transform)

    given: dict[ModuleType, dict[str, Any]] = {
        data: {"MNIST": mnist, "CIFAR10": cifar, "FakeData": fake},
        transforms: {"Compose": Compose, "ToTensor": ToTensor, "Normalize": Normalize},
        utils: {"save_image": lambda *_, **__: None},
        vision: {"datasets": data, "transforms": transforms, "utils": utils},
    }
    for name in ("Pad", "RandomHorizontalFlip", "RandomCrop"):  # no random augmentation
        given[transforms][name] = lambda *_, **__: lambda picture: picture
    for module, names in given.items():
        vars(module).update(names)
        sys.modules[module.__name__] = module
    for name in ("matplotlib", "matplotlib.pyplot", "torch.utils.tensorboard"):
        sys.modules[name] = MagicMock()


def lay_out(folder: Path) -> None:
    """The files that scripts open."""
    text = _text()
    (folder / "input.txt").write_text(text[:200_000])
    (folder / "text").mkdir(exist_ok=True)
    for name, part in (("train", text[:200_000]), ("valid", text[:9_000]), ("test", text[:9_000])):
        (folder / "text" / f"{name}.txt").write_text(part)
    (folder / "data" / "here").mkdir(parents=True, exist_ok=True)
    tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    for name in ("train", "val"):
        tokens.tofile(folder / "data" / "here" / f"{name}.bin")
    (folder / "data" / "here" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    draw = np.random.RandomState(2)
    waves = np.sin((np.arange(60)[None, :] + draw.randint(-80, 80, (100, 1))) / 1.0 / 20).astype("float64")
    torch.save(waves, folder / "traindata.pt")
    torch.serialization.add_safe_globals([np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(waves.dtype)])


def _text() -> str:
    """Something that everybody has, in ASCII."""
    found = [importlib.util.find_spec(name) for name in ("argparse", "typing", "inspect", "tarfile", "pickle")]
    texts = [Path(one.origin).read_text() for one in found if one is not None and one.origin is not None]
    return "O God, O God!\n" + "".join(letter for letter in "".join(texts) if letter.isascii())
