"""Inspect one host and print the findings as one line of JSON. ssh sends this file to `python -`, hence stdlib only.

Its argument: {"folder": "...", "paths": [...], "packages": [...]} as JSON.
"""

import glob
import importlib.metadata
import json
import os
import random
import socket
import sys


def version(package: str) -> str:
    """Return the installed version of `package`, "" when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def free_port() -> int:
    """Return a free port of 20000 to 29999, 0 when 50 tries find none.

    The system assigns no port of that range by itself: the run listens on the port only seconds later.
    """
    for port in random.SystemRandom().sample(range(20_000, 30_000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0


def memory() -> "tuple[int, int]":
    """Return the bytes of memory in all, and those that are free now; 0 when unknown."""
    try:
        with open("/proc/meminfo") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    except (OSError, ValueError, IndexError):
        return 0, 0
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def main() -> None:
    asked = json.loads(sys.argv[1])
    if os.path.isdir(asked["folder"]):
        os.chdir(asked["folder"])
    reached = os.environ.get("SSH_CONNECTION", "").split()
    found = {
        "hostname": socket.gethostname(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in asked["packages"]}},
        "missing": [path for path in asked["paths"] if not glob.glob(os.path.expanduser(path), recursive=True)],
        "address": reached[2] if len(reached) == 4 else "",
        "port": free_port(),
        "memory": memory(),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
