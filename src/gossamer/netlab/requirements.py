"""Check whether a network can be emulated here, and name what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from functools import lru_cache

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "nsenter": "util-linux"}


@lru_cache(maxsize=1)
def lab_unavailable() -> str | None:
    """Return what network emulation needs and this machine lacks, None where it works.

    Tried once per process, with a real namespace.
    """
    if not sys.platform.startswith("linux"):
        return f"the laboratory needs Linux (network namespaces), and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"the laboratory needs root (it makes network namespaces), and this is user {os.geteuid()}: use sudo"
    missing = [name for name in _TOOLS if shutil.which(name) is None]
    if missing:
        packages = sorted({_TOOLS[name] for name in missing})
        return f"the laboratory needs {', '.join(missing)}: install {' and '.join(packages)}"
    return _tried()


def _tried() -> str | None:
    name = f"gsm{threading.get_native_id()}probe"  # several threads may try at a time
    steps = (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "name", "br", "type", "bridge"],
        ["ip", "-n", name, "link", "add", "name", "ve", "type", "veth", "peer", "name", "vf"],
        ["tc", "-n", name, "qdisc", "add", "dev", "ve", "root", "handle", "1:", "htb", "default", "2"],
        f"tc -n {name} filter add dev ve protocol ip parent 1: u32 match ip dst 10.0.0.1/32 flowid 1:2".split(),
    )
    try:
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                said = done.stderr.strip().splitlines()
                return f"the laboratory needs the command `{' '.join(step)}`, which failed here: {' '.join(said)}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None
