"""A side network as a folder: side_network.safetensors, side_network.json and README.md."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

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
    besides (a head) is written too. Raises BadInput for a model without a side network, and if `target` exists.
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
    tensors |= {name: tensor.detach() for name, tensor in side_tensors(module)}
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

    Raises BadInput for a folder that is none, and for a model that it does not fit.
    """
    folder = Path(folder)
    config = _config(folder / SETTINGS)
    if config.get("digest") != (digest := _digest(module)):
        raise _other(folder, f"first weights of digest {digest}", f"{config.get('digest')}")
    side = build(config["side"], key=KEY)
    tried = copy.deepcopy(module).to("meta")  # so that a folder that does not fit leaves the model as it is
    attach(tried, side, seed=0)
    route, wanted = route_of(tried), {name: one.shape for name, one in tried.named_parameters()}
    if route is None or list(route.taps) != config["taps"]:
        raise _other(folder, f"taps {', '.join(route.taps) if route else 'none'}", ", ".join(config["taps"]))
    try:
        with safe_open(str(folder / WEIGHTS), framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{folder / WEIGHTS} cannot be read: {error}", key=KEY) from None
    for name, tensor in tensors.items():
        if wanted.get(name) != tensor.shape:
            found = tuple(wanted[name]) if name in wanted else "no such parameter"
            raise _other(folder, f"{name}: {found}", f"{name}: {tuple(tensor.shape)}")
    missing = {name for name in wanted if name.startswith(f"{CHILD}.")} - tensors.keys()
    if missing:
        raise _other(folder, f"{min(missing)}", "no such tensor")
    attach(module, side, seed=0)
    held = dict(module.named_parameters())
    for name, tensor in tensors.items():
        held[name].copy_(tensor)


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


def check_no_side(module: nn.Module, place: str) -> None:
    """Raise BadInput for a model with a side network, of which another one is to be made."""
    if route_of(module) is not None:
        raise bad_input(
            wanted="a model that is one without a side network",
            got=f"{place}, whose side network reads all of its blocks, which no weight of the model can hold",
            do="take the model that it was trained beside; gossamer export --to side keeps the side network",
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
