"""The optional packages: which extra holds what, read from the installed package's own metadata."""

from __future__ import annotations

import re
from importlib import metadata

_WANTED = re.compile(r"""^([A-Za-z0-9._-]+)[^;]*;.*extra\s*==\s*['"]([A-Za-z0-9_-]+)['"]""")


def extras() -> dict[str, tuple[str, ...]]:
    """Extra -> the distributions it installs, e.g. hf -> (gguf, tokenizers, transformers)."""
    found: dict[str, set[str]] = {}
    for line in metadata.requires("gossamer") or ():
        if (match := _WANTED.match(line)) and match.group(1) != "gossamer":
            found.setdefault(match.group(2), set()).add(match.group(1))
    return {extra: tuple(sorted(names)) for extra, names in sorted(found.items())}


def version_of(distribution: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def extra_with(module: str) -> str | None:
    """The extra that installs the module (mlflow comes with mlflow-skinny); None for what is none of them."""
    module = module.partition(".")[0].replace("_", "-")
    for extra, names in extras().items():
        if extra != "dev" and any(name == module or name.startswith(f"{module}-") for name in names):
            return extra
    return None


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'gossamer[{extra}]'"
