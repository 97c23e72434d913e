"""Whole tensors in a safetensors file, each compared with the shape, dtype and checksum that a JSON head says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.spec.errors import BadInput, bad_input
from gossamer.store.checkpoint.checksum import checksum, dtype_name
from gossamer.store.checkpoint.shard import write_shard
from gossamer.store.slices import Slice

Damaged = Callable[[str], BadInput]  # the error of a folder that is not as it was written, from what was found


def check_absent(target: Path, *, key: str = "") -> None:
    """Raise BadInput if there is something at `target`, where a new folder is to be written."""
    if target.exists() or target.is_symlink():
        do = "name another folder, or remove this one first: nothing is ever overwritten"
        raise bad_input(wanted="a new folder to write", got=f"{target}, which exists", do=do, key=key)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a file of tensors; return what the head says of each, by name."""
    pieces = [
        (Slice.whole(name, tuple(tensor.shape)), tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()
    ]
    shard = write_shard(file, pieces, {"format": "pt"})
    return {
        one.where.name: {"shape": list(one.where.shape), "dtype": one.dtype, "checksum": one.crc}
        for one in sorted(shard.placed, key=lambda one: one.where.name)
    }


def read_tensor(file: Path, name: str, known: Mapping[str, Any], damaged: Damaged) -> Tensor:
    """Read one tensor; raise what `damaged` returns where it is not what the head says, `known`, or cannot be read."""
    try:
        with safe_open(str(file), framework="pt") as stored:
            found: Tensor = stored.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise damaged(f"{file.name} that cannot be read ({error})") from None
    is_same = list(found.shape) == list(known["shape"]) and dtype_name(found.dtype) == known["dtype"]
    if not is_same or checksum(Slice.whole(name, tuple(found.shape)), found) != known["checksum"]:
        raise damaged(f"{name} in {file.name} with other data")
    return found
