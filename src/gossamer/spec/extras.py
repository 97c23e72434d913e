"""Optional packages: the contents of each extra, and the command that installs it here, from the package's metadata."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "gossamer"
_WANTED = re.compile(r"""^([A-Za-z0-9._-]+)\s*([^;]*?)\s*;.*extra\s*==\s*['"]([A-Za-z0-9_-]+)['"]""")


def extras() -> dict[str, tuple[str, ...]]:
    """Return the distributions that each extra installs, e.g. hf -> (gguf, tokenizers, transformers)."""
    return {extra: tuple(names) for extra, names in _requirements().items()}


def version_of(distribution: str) -> str | None:
    """Return the installed version of `distribution`; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def extra_with(module: str) -> str | None:
    """Return the extra that installs `module` (mlflow comes with mlflow-skinny); None where no extra does."""
    module = module.partition(".")[0].replace("_", "-")
    for extra, names in extras().items():
        if extra != "dev" and any(name == module or name.startswith(f"{module}-") for name in names):
            return extra
    return None


def install(extra: str) -> str:
    """Return the command that installs `extra` into this very interpreter.

    The command names the source that the package itself was installed from; where that is unknown, the extra's packages
    by name. It never names the bare package: an index may hold another project under that name.
    """
    source = _source()
    if source is None:
        wanted = [f"{name}{limits}" for name, limits in _requirements().get(extra, {}).items()]
        return " ".join([_pip(), "install", *map(shlex.quote, wanted)])
    flag, place = source
    named = f"{PACKAGE}[{extra}] @ {place}" if "://" in place else f"{place}[{extra}]"
    return " ".join([_pip(), "install", *([flag] if flag else []), shlex.quote(named)])


def _requirements() -> dict[str, dict[str, str]]:
    """Extra -> distribution -> the versions it may have, ">=5,<6"."""
    found: dict[str, dict[str, str]] = {}
    for line in _metadata() or ():
        if (match := _WANTED.match(line)) and match.group(1) != PACKAGE:
            found.setdefault(match.group(3), {})[match.group(1)] = match.group(2).strip("() ")
    return {extra: dict(sorted(names.items())) for extra, names in sorted(found.items())}


def _metadata() -> list[str] | None:
    try:
        return metadata.requires(PACKAGE)
    except metadata.PackageNotFoundError:  # run from its source, installed nowhere
        return None


def _source() -> tuple[str, str] | None:
    """("-e" or "", a folder or an address) that the package was installed from, as pip wrote it down."""
    try:
        said = json.loads(metadata.distribution(PACKAGE).read_text("direct_url.json") or "{}")
        url, editable = str(said["url"]), bool(said.get("dir_info", {}).get("editable"))
    except metadata.PackageNotFoundError:  # run from its source
        checkout = Path(__file__).parents[3]
        return ("-e", str(checkout)) if (checkout / "pyproject.toml").is_file() else None
    except (OSError, ValueError, KeyError):
        return None
    if (vcs := said.get("vcs_info")) is not None:
        return "", f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', 'HEAD')}"
    parts = urlsplit(url)
    if parts.scheme != "file":
        return "", url
    place = unquote(parts.path)
    if not Path(place).exists():  # built somewhere else, or moved since
        return None
    return ("-e" if editable else ""), place


def _pip() -> str:
    """pip of this interpreter: by its short name where the shell would take the same."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
