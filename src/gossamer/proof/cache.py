"""Cache of proofs by digest: a layout with the same code, plan, model, versions and data is not proved again."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import sys
from functools import cache
from pathlib import Path

import torch
from torch import nn

from gossamer.run.parts import Parts

_PLAN = {
    "reasons",
    "forecast",
    "exchange",
    "adapted_from",
    "activation_compression",
    "islands",
    "look_ahead",
    "bucket_bytes",
    "buckets",
    "turns",
    "links",
}


def digest_of(parts: Parts, described: str, data: str) -> str:
    """Return a hash of the code, plan, model, data and versions, which changes if a proof might come out differently.

    `described`: the model, in words; `data`: fingerprint of the training data.
    """
    config = parts.config
    said = {
        "gossamer": _own_code(),
        "versions": [torch.__version__, sys.version, platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "device": parts.device.type,
        "plan": parts.plan.model_dump(mode="json", exclude=_PLAN),
        "model": [described, config.model.model_dump(mode="json"), _code_of(parts.outline)],
        "shapes": [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in parts.outline.named_parameters()],
        "train": [config.train.seed, config.train.precision, config.train.loss, config.train.batch],
        "data": [data, config.data.model_dump(mode="json", exclude={"cache"})],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def is_kept(file: Path, digest: str) -> bool:
    """Return whether `file` records a proof of `digest`, as far as this rank can read the file."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("digest") == digest


def keep(file: Path, digest: str, message: str) -> None:
    """Write `digest` and the proof's message to `file`, as JSON. Raises OSError."""
    file.write_text(json.dumps({"digest": digest, "message": message}, indent=1) + "\n", "utf-8")


@cache
def _own_code() -> str:
    package = Path(__file__).parent.parent
    return _digest_of(sorted(package.rglob("*.py")))


def _code_of(module: nn.Module) -> str:
    """Return a digest of the source files that define the classes of the module's submodules."""
    files = set()
    for kind in {type(one) for one in module.modules()}:
        for base in kind.__mro__:
            try:
                files.add(inspect.getsourcefile(base))
            except TypeError:  # a builtin, or made at a prompt
                continue
    return _digest_of(sorted(Path(file) for file in files if file))


def _digest_of(files: list[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()
