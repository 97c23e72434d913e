"""Training from a file: states of 4 GiB in 1 GiB of memory, and the same loss as plain training at a small size.

All of a run, its interpreter and its page cache included, is in one cgroup with a limit; where no cgroup can be made,
the peak is that of the process's resident memory, and `setting` says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gossamer.netlab import cgroup
from gossamer.spec.errors import BadInput, RunFailed
from savers import Row

NOT_QUICK = "states of 4 GiB in 1 GiB of memory: 12 GiB are moved in each step"
LEFT_OUT = "DeepSpeed's offload: not run, see docs/howto/train_from_a_file.md"
_SMALL = {"blocks": 4, "width": 512, "sequence": 64, "batch": 8, "steps": 6}  # 8.7 M parameters
_LARGE = {"blocks": 32, "width": 1024, "sequence": 128, "batch": 4, "steps": 4}  # 269 M parameters
_LIMIT = 1 << 30


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
    return found


def _row(shape: dict[str, int], limits: dict[str, str] | None, *, clip: float) -> Row:
    folder = tempfile.mkdtemp(prefix="gossamer-tiers-", dir=os.environ.get("GOSSAMER_DISK"))
    threads = len(os.sched_getaffinity(0))
    asked = {**shape, "folder": folder, "clip": clip, "threads": threads, "resident": 64 << 20}
    asked["tiers"] = None if limits is None else {**limits, "directory": folder + "/tiers"}
    try:
        with _limited(asked) as group:
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
            "left_out": LEFT_OUT,
        },
    )


_PEAK = "memory.max_usage_in_bytes"


@contextmanager
def _limited(asked: dict[str, Any]) -> Iterator[Path | None]:
    """Make a cgroup for a run with tiers; None where none can be made, and for plain training."""
    try:
        mount = cgroup.find("memory")
        prefix = f"gossamer-tiers-{os.getpid()}"
        cgroup.make(mount, prefix, [cgroup.limit_files(_LIMIT, mount.version)])
    except (BadInput, RunFailed, OSError):
        yield None
        return
    group = mount.host(prefix, 0)
    if mount.version == 2:
        globals()["_PEAK"] = "memory.peak"
    try:
        yield group if asked["tiers"] is not None else None
    finally:
        for one in (group, group.parent):
            one.rmdir()


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name("_tiers_run.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asked)], capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode:
        raise RunFailed(f"tiers: {done.stderr[-2000:]} (exit {done.returncode})")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
