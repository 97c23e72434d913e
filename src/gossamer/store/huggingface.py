"""A directory that transformers loads: safetensors, config.json, tokenizer files, a model card."""

from __future__ import annotations

import errno
import json
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.spec.errors import RunFailed, bad_input
from gossamer.spec.units import show_bytes
from gossamer.store.checkpoint.shard import write_shard
from gossamer.store.slices import NamedSlice, Slice

_INFO = {"format": "pt"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def export_directory(
    target: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    files: Mapping[str, bytes | Path] | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> int:
    """Write the new directory `target`; return the bytes of the weights.

    It holds model.safetensors (or numbered shards of at most `max_shard_bytes`, and their index) and config.json from
    `config`. It also holds `files` (tokenizer files and the like: name -> content, or the file that holds it), and a
    README.md unless they hold one.

    Tensors are taken one by one and held for one shard at a time. A tensor given under two names (a tied weight) is
    written under the first, provided that the object given first is still alive then.
    Raises BadInput where `target` exists or cannot be written, RunFailed where the disk is full. A failed export leaves
    no files.
    """
    files = dict(files or {})
    _check(target, files)
    with new_folder(target) as partial:
        size_bytes, count = _write_weights(partial, tensors, max_shard_bytes)
        files = {"README.md": _card(target.name, config, count, size_bytes).encode(), **files}
        files["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
        _write_files(partial, files)
    return size_bytes


def export_adapter_directory(
    target: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    files: Mapping[str, bytes | Path],
    *,
    weights: str = "adapter_model.safetensors",
    settings: str = "adapter_config.json",
) -> int:
    """Write the new directory `target` as peft does; return the bytes of the adapter.

    It holds the tensors in the file `weights`, `config` in the file `settings`, and `files`. Raises as
    `export_directory`.
    """
    _check(target, files)
    pieces = [(Slice.whole(name, tuple(tensor.shape)), tensor.detach().cpu()) for name, tensor in tensors.items()]
    with new_folder(target) as partial:
        write_shard(partial / weights, pieces, _INFO)
        _write_files(partial, {**files, settings: (json.dumps(config, indent=2) + "\n").encode()})
    return sum(tensor.nbytes for tensor in tensors.values())


def _write_files(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data.read_bytes() if isinstance(data, Path) else data)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that becomes `target` when the body has ended, and is removed if it fails."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(target)
    except OSError as error:
        if error.errno not in _FULL:
            raise bad_input(
                wanted=f"a folder that can be written at {target}",
                got=error.strerror or str(error),
                do="name another folder",
            ) from None
        free = show_bytes(shutil.disk_usage(target.parent).free) if target.parent.is_dir() else "nothing"
        raise RunFailed(
            f"{target} was not written: {error.strerror} ({free} free): free disk space, or name another folder"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check(target: Path, files: Mapping[str, bytes | Path]) -> None:
    if target.exists() or target.is_symlink():
        raise bad_input(
            wanted="a new folder to export into",
            got=f"{target}, which exists",
            do="name another folder, or remove this one first: nothing is ever overwritten",
        )
    for name in files:
        if Path(name).name != name or name == "config.json" or name.endswith((".safetensors", ".index.json")):
            raise bad_input(
                wanted="plain names beside config.json and the weights",
                got=repr(name),
                do="remove that file or rename it",
            )


def _write_weights(
    folder: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> tuple[int, int]:
    """(bytes, elements) written."""
    shards: list[list[str]] = []
    size_bytes = count = 0
    for pieces in _in_shards(_untied(tensors), max_shard_bytes):
        write_shard(folder / f"part-{len(shards)}", pieces, _INFO)
        shards.append([where.name for where, _ in pieces])
        size_bytes += sum(tensor.nbytes for _, tensor in pieces)
        count += sum(where.numel for where, _ in pieces)
    names = _shard_names(len(shards))
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    if len(shards) > 1:
        weight_map = {key: name for keys, name in zip(shards, names, strict=True) for key in keys}
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return size_bytes, count


def _shard_names(count: int) -> Sequence[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _untied(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterable[NamedSlice]:
    """Every tensor once, as a contiguous host tensor."""
    seen: dict[tuple[object, ...], weakref.ref[Tensor]] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = seen.get(place)
        if tensor.numel() and first is not None and first() is not None:  # dead: its memory serves another tensor now
            continue
        seen[place] = weakref.ref(tensor)
        yield Slice.whole(name, tuple(tensor.shape)), tensor.detach().cpu().contiguous()


def _in_shards(pieces: Iterable[NamedSlice], max_shard_bytes: int) -> Iterable[list[NamedSlice]]:
    """Groups of at most `max_shard_bytes`; a larger tensor is alone. At least one group."""
    group: list[NamedSlice] = []
    held = total = 0
    for piece in pieces:
        size = piece[1].nbytes
        if group and held + size > max_shard_bytes:
            yield group
            total += 1
            group, held = [], 0
        group.append(piece)
        held += size
    if group or not total:
        yield group


def _card(name: str, config: Mapping[str, Any], count: int, size_bytes: int) -> str:
    kinds = config.get("architectures") or [config.get("model_type", "model")]
    return _README.format(name=name, kind=kinds[0], count=f"{count / 1e6:,.1f} M", size=show_bytes(size_bytes))


_README = """\
---
library_name: transformers
tags: [gossamer]
---
# {name}

{kind}, {count} parameters ({size}), trained with Gossamer. Load it from this folder:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")  # where tokenizer files lie beside this page
```
"""
