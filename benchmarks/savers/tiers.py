"""Training from a file: states of 4 GiB in 1 GiB of memory, and the same loss as plain training at a small size.

All of a run, its interpreter and its page cache included, is in one cgroup with a limit; where no cgroup can be made,
the peak is that of the process's resident memory, and `setting` says so.

The peer is DeepSpeed's ZeRO-Infinity with parameters and states in files, in an environment of its own, whose python
TIERS_PEER names: it gets 1, 2, 4 and 8 GiB, and its row is that of the first limit in which it is not killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.netlab import cgroup
from gossamer.spec.errors import BadInput, RunFailed
from savers import Row

NOT_QUICK = "states of 4 GiB in 1 GiB of memory: 12 GiB are moved in each step"
PYTHON = "TIERS_PEER"  # the python of an environment with deepspeed (and libaio, and a compiler)
LEFT_OUT = f"DeepSpeed's offload: {PYTHON} names no environment with it"
_SMALL = {"blocks": 4, "width": 512, "sequence": 64, "batch": 8, "steps": 6}  # 8.7 M parameters
_LARGE = {"blocks": 32, "width": 1024, "sequence": 128, "batch": 4, "steps": 4}  # 269 M parameters
_LIMIT = 1 << 30
_PEER_LIMITS = tuple(_LIMIT << doubled for doubled in range(4))
_KILLED = -9


def rows(*, quick: bool) -> list[Row]:
    small = {"device": "16MiB", "host": "160MiB", "file": "300MB"}
    ways = [(update, clip) for clip in (0.0, 1.0) for update in ("threads", "process")]
    found = [_row(_SMALL, {**small, "update": update}, clip=clip) for update, clip in ways]
    found.append(_row(_SMALL, None, clip=0.0))
    if len({row.loss for row in found if "no clipping" in row.setting}) != 1:
        raise RunFailed("tiers: the loss is not that of plain training")
    if not quick:
        large = {"device": "112MiB", "host": "224MiB", "file": "7GiB"}
        found += [_row(_LARGE, {**large, "update": update}, clip=0.0) for update in ("threads", "process")]
        if os.environ.get(PYTHON):
            found.append(_peer_row(_LARGE))
    return found


def _peer_row(shape: dict[str, int]) -> Row:
    """Train under DeepSpeed, in the smallest of the limits in which it is not killed."""
    python = os.environ[PYTHON]
    beside = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}  # ninja, which compiles its kernels
    killed: list[int] = []
    for limit in _PEER_LIMITS:
        folder = tempfile.mkdtemp(prefix="deepspeed-tiers-", dir=os.environ.get("GOSSAMER_DISK"))
        asked = {**shape, "folder": folder, "clip": 0.0, "threads": len(os.sched_getaffinity(0))}
        try:
            with _limited(limit) as group:
                if group is None:
                    raise RunFailed("tiers: the peer is measured where a cgroup can be made")
                done = _called("_deepspeed_run.py", {**asked, "cgroup": str(group)}, python, beside)
                peak = int((group / _PEAK).read_text())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if done.returncode == _KILLED:
            killed.append(limit)
            continue
        found = _said(done)
        steps = [b - a for a, b in pairwise(found["ended"])]
        return Row(
            method="tiers",
            peer="DeepSpeed ZeRO-Infinity",
            setting=f"{found['parameters'] / 1e6:.1f} M parameters, AdamW, {found['dtype'].removeprefix('torch.')}, "
            f"no clipping; all in a cgroup of {limit >> 30} GiB; parameters and states in files",
            peak_bytes=peak,
            planned_peak_bytes=limit,
            step_s=median(steps[1:]),
            loss=found["losses"][-1],
            details={
                "version": found["version"],
                "killed_at_bytes": killed,
                "seconds": steps,
                "losses": found["losses"],
            },
        )
    raise RunFailed(f"tiers: DeepSpeed was killed at every limit up to {_PEER_LIMITS[-1]} bytes")


def _row(shape: dict[str, int], limits: dict[str, str] | None, *, clip: float) -> Row:
    folder = tempfile.mkdtemp(prefix="gossamer-tiers-", dir=os.environ.get("GOSSAMER_DISK"))
    threads = len(os.sched_getaffinity(0))
    asked = {**shape, "folder": folder, "clip": clip, "threads": threads, "resident": 64 << 20}
    asked["tiers"] = None if limits is None else {**limits, "directory": folder + "/tiers"}
    try:
        with nullcontext() if limits is None else _limited(_LIMIT) as group:
            found = _run({**asked, "cgroup": str(group or "")})
            peak = int((group / _PEAK).read_text()) if group is not None else found["rss_peak"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    parameters, told = found["parameters"], "no clipping" if not clip else "clipped: nothing is hidden"
    where = "all in a cgroup of 1 GiB" if group is not None else "resident memory alone, as no cgroup can be made"
    base = f"{parameters / 1e6:.1f} M parameters, AdamW, float32, {told}"
    if limits is None:
        return Row(method="tiers", peer="plain", setting=base, peak_bytes=found["rss_peak"], loss=found["losses"][-1])
    steps = [{key: b[key] - a[key] for key in a} for a, b in pairwise(found["marks"])]
    one = {key: median(step[key] for step in steps) for key in steps[0]}
    bound = max((one["cpu"] + one["system"]) / threads, one["bytes"] / found["rate"])
    return Row(
        method="tiers",
        setting=f"{base}; {where}; device {limits['device']}, host {limits['host']}, file {limits['file']}; "
        f"update: {limits['update']}",
        peak_bytes=peak,
        planned_peak_bytes=_LIMIT if group is not None else None,
        step_s=one["at"],
        hidden_share=1 - one["waited"] / one["active"],
        bytes_per_parameter=found["file_bytes"] / parameters,
        loss=found["losses"][-1],
        details={
            "bound_s": bound,
            "over_bound": one["at"] / bound,
            "core_s": one["cpu"] + one["system"],
            "moved_bytes": one["bytes"],
            "rate_bytes_per_s": found["rate"],
            "is_direct": bool(found["direct"]),
            "resident_peak_bytes": found["rss_peak"],
            "device_peak_bytes": found["device_peak"],
            "host_peak_bytes": found["host_peak"],
            "states_bytes": 16 * parameters,
            **({} if os.environ.get(PYTHON) else {"left_out": LEFT_OUT}),
        },
    )


_PEAK = "memory.max_usage_in_bytes"


@contextmanager
def _limited(limit: int) -> Iterator[Path | None]:
    """Make a cgroup with so many bytes of memory; None where none can be made."""
    try:
        mount = cgroup.find("memory")
        prefix = f"gossamer-tiers-{os.getpid()}"
        cgroup.make(mount, prefix, [cgroup.limit_files(limit, mount.version)])
    except (BadInput, RunFailed, OSError):
        yield None
        return
    group = mount.host(prefix, 0)
    if mount.version == 2:
        globals()["_PEAK"] = "memory.peak"
    try:
        yield group
    finally:
        for one in (group, group.parent):
            one.rmdir()


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    return _said(_called("_tiers_run.py", asked, sys.executable, {}))


def _called(
    script: str, asked: dict[str, Any], python: str, beside: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = [python, str(Path(__file__).with_name(script)), json.dumps(asked)]
    environment = {**os.environ, **beside}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800, env=environment)


def _said(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode:
        raise RunFailed(f"tiers: {done.stderr[-2000:]} (exit {done.returncode})")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
