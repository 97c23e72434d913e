"""Peers that are not torch itself live in environments of their own, made on demand beside the user's other caches."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

_PACKAGES = {"deepspeed": "deepspeed==0.19.8", "torchft": "torchft==0.2.0"}


def folder() -> Path:
    """Where this benchmark keeps what it made before: environments, rounds and losses."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "gossamer-links"


@cache
def interpreter(name: str) -> str:
    """The Python of environment `name` ("": this one), made if it is not there. Raises OSError, CalledProcessError."""
    if not name:
        return sys.executable
    made = folder() / "peers" / name
    python = made / "bin" / "python"
    if not (made / "complete").exists():
        _run([sys.executable, "-m", "venv", "--clear", str(made)])
        inner = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        # torch, transformers and Gossamer are this environment's own: the peer is measured with the same ones.
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(inner) / "outer.pth").write_text(line)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-build-isolation"]
        _run([*pip, "setuptools", "wheel"])
        _run([*pip, _PACKAGES[name]])
        (made / "complete").touch()
    return str(python)


def _run(argv: list[str]) -> str:
    env = {**os.environ, "DS_BUILD_OPS": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=900)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise OSError(f"{' '.join(argv[1:])}: {said[-1]}")
    return done.stdout
