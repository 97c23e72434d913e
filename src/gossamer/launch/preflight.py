"""Check before an ssh launch that every host can run it and that versions agree; list problems in a table."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from gossamer.process.json_lines import Said, read_line
from gossamer.spec.errors import BadInput, WireMismatch

_PROGRAM = Path(__file__).with_name("_preflight_host.py")
_LOOK_S = 60.0
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10", "-T")


class HostFindings(Said):
    """The findings on one host. address: where ssh reached it, "" when unknown; port: a free port.

    memory: its bytes in all, and those that are free now; 0 when unknown.
    """

    hostname: str
    versions: dict[str, str]
    missing: tuple[str, ...]
    address: str
    port: int
    memory: tuple[int, int]


_FOUND: TypeAdapter[HostFindings] = TypeAdapter(HostFindings)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRequirements:
    """The requirements on every host. `python`: path of the interpreter there; `packages`: must have equal versions.

    `paths`: file names, folders or patterns that must exist, relative to `folder`.
    """

    python: str
    packages: tuple[str, ...] = ("gossamer", "torch")
    paths: tuple[str, ...] = ()
    folder: str = ""


def look(hosts: Sequence[str], wanted: HostRequirements) -> dict[str, HostFindings]:
    """Inspect every host over ssh and return the findings by host.

    Raises BadInput with a table when a host cannot be reached, lacks something or has other versions.
    """
    with ThreadPoolExecutor(max_workers=min(32, len(hosts)), thread_name_prefix="gossamer-look") as pool:
        seen = dict(zip(hosts, pool.map(lambda host: _look_at(host, wanted), hosts), strict=True))
    found = {host: result for host, result in seen.items() if isinstance(result, HostFindings)}
    problems = {host: result for host, result in seen.items() if isinstance(result, str)}
    columns = ("python", *wanted.packages)
    for host, one in found.items():
        lacks = [f"no {name}" for name in columns if not one.versions.get(name)] + [f"no {p}" for p in one.missing]
        if lacks:
            problems[host] = ", ".join(lacks)
    seen_of = {name: {_comparable(one.versions.get(name, "")) for one in found.values()} for name in columns}
    differing = [name for name in columns if len(seen_of[name]) > 1]
    if problems or differing:
        differ = f"; the versions of {', '.join(differing)} must be equal on all hosts" if differing else ""
        table = _table(hosts, columns, found, problems)
        raise BadInput(f"not every host is ready to train{differ}; fix the problems in this table:\n{table}")
    return found


def _look_at(host: str, wanted: HostRequirements) -> HostFindings | str:
    """What was found, or what went wrong."""
    question = json.dumps({"folder": wanted.folder, "paths": wanted.paths, "packages": wanted.packages})
    command = [*SSH, host, shlex.join([wanted.python, "-", question])]
    try:
        said = subprocess.run(
            command, input=_PROGRAM.read_text("utf-8"), capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except FileNotFoundError:
        raise BadInput("there is no ssh on this machine: install it, or start the command on every host") from None
    except subprocess.TimeoutExpired:
        return f"no answer within {_LOOK_S:.0f} s"
    if said.returncode:
        last = (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]
        return f"cannot be reached: {last}" if said.returncode == 255 else f"cannot run {wanted.python}: {last}"
    try:
        return read_line(said.stdout.strip().rpartition("\n")[2].encode(), _FOUND)
    except WireMismatch:
        return f"unexpected output {said.stdout[-80:]!r} (its shell's start-up files must print nothing)"


def _comparable(version: str) -> str:
    """Builds for CPU and GPU of one version agree; so do bug-fix releases of Python ("3.11.7" and "3.11.9")."""
    public = version.partition("+")[0]
    return ".".join(public.split(".")[:2]) if public.startswith("3.") else public


def _table(
    hosts: Sequence[str], columns: Sequence[str], found: dict[str, HostFindings], problems: dict[str, str]
) -> str:
    rows = [("host", *columns, "problem")]
    for host in hosts:
        versions = found[host].versions if host in found else {}
        rows.append((host, *(versions.get(name) or "-" for name in columns), problems.get(host, "")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"  {'  '.join(row)}".rstrip() for row in padded)
