"""Tensors in memory that two processes of one machine share, without a name on any disk."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.spec.errors import RunFailed
from gossamer.spec.units import show_gib

_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is, without its values. `dtype`: as torch names it, such as "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor."""
        return TensorForm(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return torch.Size(self.shape).numel() * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors by name in one piece of memory, at places that follow from their forms. Another process that has the
    `descriptor` and the forms sees the same values.
    """

    descriptor: int
    tensors: Mapping[str, Tensor]

    @staticmethod
    def new(forms: Sequence[TensorForm]) -> SharedTensors:
        """Return new tensors of zeros. Raises RunFailed where the machine has no memory for them."""
        nbytes = _places(forms)[-1]
        try:
            descriptor = _file(nbytes)
        except OSError as error:
            raise RunFailed(
                f"{show_gib(nbytes)} of shared memory for the companion process are not to be had: {error.strerror}; "
                "set train.adversarial.ahead to false"
            ) from None
        return SharedTensors.at(descriptor, forms)

    @staticmethod
    def at(descriptor: int, forms: Sequence[TensorForm]) -> SharedTensors:
        """Return the tensors that another process has made. Raises ValueError where its memory is shorter."""
        places = _places(forms)
        memory = torch.frombuffer(mmap.mmap(descriptor, places[-1]), dtype=torch.uint8)
        found = {
            form.name: memory[place : place + form.nbytes].view(getattr(torch, form.dtype)).view(form.shape)
            for form, place in zip(forms, places, strict=False)
        }
        return SharedTensors(descriptor, found)

    def close(self) -> None:
        """Close the descriptor. The tensors stay usable."""
        os.close(self.descriptor)


def _places(forms: Sequence[TensorForm]) -> list[int]:
    """Return where each tensor begins, in bytes, and where the last one ends."""
    places = [0]
    for form in forms:
        places.append(places[-1] + max(1, -(-form.nbytes // _ALIGNED_BYTES)) * _ALIGNED_BYTES)
    return places if forms else [0, _ALIGNED_BYTES]


def _file(nbytes: int) -> int:
    """Return the descriptor of a file in memory that has `nbytes`; where there is none such, of a nameless file."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("gossamer")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)  # now, and not as a signal at the first write
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
