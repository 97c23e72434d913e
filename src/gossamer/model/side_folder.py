"""A side network as a folder: side_network.safetensors, side_network.json and README.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gossamer.model.side import CHILD, KEY, attach, build, route_of, side_tensors
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Written
from gossamer.store.huggingface import export_adapter_directory

WEIGHTS, SETTINGS = "side_network.safetensors", "side_network.json"
_FORMAT = 1
_SAMPLE = 4096  # elements that a digest of the model is of


def export_side(module: nn.Module, written: Written, base: str, target: Path) -> str:
    """Write the side network of `module` to the new directory `target`; return the Python code that loads it.

    `written`: as it was configured. `base`: folder, file or name of the model that it goes beside. What was trained
    besides (a head) is written too, with the statistics of a norm. Raises BadInput for a model without a side network,
    and if `target` exists.
    """
    route = route_of(module)
    if route is None:
        raise bad_input(
            wanted="a run with a side network",
            got="a run without one (model.side none)",
            do="export it with --to hf",
            key="export",
        )
    tensors = {name: tensor.detach() for name, tensor in module.named_parameters() if tensor.requires_grad}
    tensors |= _statistics(module, tensors) | {name: tensor.detach() for name, tensor in side_tensors(module)}
    config = {"format": _FORMAT, "side": written, "taps": list(route.taps), "base": base, "digest": _digest(module)}
    load = f"gossamer.model.side_folder.load_side(module, {str(target)!r})"
    readme = _README.format(base=base or "the model that it was trained beside", folder=target.name)
    export_adapter_directory(
        target, tensors, config, {"README.md": readme.encode()}, weights=WEIGHTS, settings=SETTINGS
    )
    return load


@torch.no_grad()
def load_side(module: nn.Module, folder: str | Path) -> None:
    """Put the side network in `folder` beside `module`, in place: the model that it was trained beside.

    Raises BadInput for a folder that is none, and for a model that it does not fit, which stays as it was.
    """
    folder = Path(folder)
    config = _config(folder / SETTINGS)
    if config.get("digest") != (digest := _digest(module)):
        raise _other(folder, f"first weights of digest {digest}", f"{config.get('digest')}")
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder / WEIGHTS} cannot be read: {error}", key=KEY) from None
    undo = attach(module, build(config["side"], key=KEY), seed=0)
    try:
        held = _fitting(module, folder, config["taps"], stored)
    except BadInput:
        undo()
        raise
    for name, tensor in stored.items():
        held[name].copy_(tensor)


def _fitting(module: nn.Module, folder: Path, taps: list[str], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model by name. Raises BadInput unless the side network `stored` in `folder` fits them."""
    route, held = route_of(module), {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if route is None or list(route.taps) != taps:
        raise _other(folder, f"taps {', '.join(route.taps) if route else 'none'}", ", ".join(taps))
    for name, tensor in stored.items():
        if name not in held or held[name].shape != tensor.shape:
            found = tuple(held[name].shape) if name in held else "no such tensor"
            raise _other(folder, f"{name}: {found}", f"{name}: {tuple(tensor.shape)}")
    wanted = {name for name, _ in side_tensors(module)} | _statistics(module, stored.keys()).keys()
    if missing := wanted - stored.keys():
        raise _other(folder, f"{min(missing)}", "no such tensor")
    return held


def _statistics(module: nn.Module, trained: Collection[str]) -> dict[str, Tensor]:
    """Return the running statistics of norms whose parameters are among `trained`: training has moved them, too."""
    return {
        f"{path}.{name}": tensor
        for path, norm in module.named_modules()
        if isinstance(norm, _NormBase) and any(f"{path}.{name}" in trained for name, _ in norm.named_parameters())
        for name, tensor in norm.named_buffers()
    }


def _digest(module: nn.Module) -> str:
    """Return a digest of a sample of the first weights of a model, as bfloat16, in which all types hold them alike."""
    first = next(p for name, p in module.named_parameters() if not name.startswith(f"{CHILD}."))
    rows = first.detach().flatten()[:_SAMPLE].to("cpu", torch.bfloat16)
    return hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _config(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read: {error}", key=KEY) from None
    if not isinstance(read, dict) or read.get("format") != _FORMAT or not isinstance(read.get("taps"), list):
        raise bad_input(
            wanted=f"a side network of format {_FORMAT}",
            got=f"{file}, which is none",
            do="export one with gossamer export RUN --to side FOLDER",
            key=KEY,
        )
    return read


def _other(folder: Path, found: str, stored: str) -> BadInput:
    return bad_input(
        wanted="the model that the side network was trained beside",
        got=f"one with {found}, and in {folder} {stored}",
        do="load the same model as before",
        key=KEY,
    )


def check_mergeable(module: nn.Module) -> None:
    """Raise BadInput for a model with a side network, to be written as one model."""
    if route_of(module) is not None:
        raise bad_input(
            wanted="a model that is one without a side network",
            got="one whose side network reads all of its blocks, which no weight of the model can hold",
            do="export the side network alone with --to side",
            key="export",
        )


_README = """\
# A side network

side_network.safetensors holds it, and side_network.json its settings. It goes beside {base}. To load it:

```python
import gossamer.model.side_folder

module = ...  # that model, for instance transformers.AutoModelForCausalLM.from_pretrained(...)
gossamer.model.side_folder.load_side(module, "{folder}")
```

The model then reads whole sequences: call generate(..., use_cache=False).
"""
