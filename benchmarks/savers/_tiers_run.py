"""One run of benchmarks/savers/tiers.py: trains in this process and prints its figures as one JSON line.

python _tiers_run.py '{"folder": ..., "blocks": ..., "width": ..., "steps": ..., "tiers": {...} or null, ...}'
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["cgroup"]:  # before anything is imported: all of it counts
        Path(asked["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    print(json.dumps(run(asked)))


def cpu_seconds(pid: int) -> float:
    """Return the seconds of all cores that a process has used."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def run(asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from _tiers_model import Model, row

    import gossamer
    from gossamer.model.mapped_storage import mapped
    from gossamer.run.allocator import give_freed_memory_back
    from gossamer.run.update_process import UpdateProcess
    from gossamer.sharding import TieredStates
    from peak import resident_peak_bytes

    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 256

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = row(index, asked["sequence"])
            return {"input_ids": ids, "labels": ids}

    marks: list[dict[str, float]] = []
    rate, apart_peak = {"rate": 0.0}, 0
    commit = TieredStates.commit

    def marked(self: TieredStates, updates: int) -> None:
        commit(self, updates)
        nonlocal apart_peak
        used, apart = resource.getrusage(resource.RUSAGE_SELF), 0.0
        if isinstance(self.updater, UpdateProcess):
            apart = cpu_seconds(self.updater.link.process.pid)
            apart_peak = resident_peak_bytes(self.updater.link.process.pid)
        rate["rate"] = self.rate
        rate["direct"] = float(self.file.is_direct)
        rate["device_peak"], rate["host_peak"] = self.limits.device.peak, self.limits.host.peak
        rate["file_bytes"] = self.layout.size_bytes
        marks.append(
            {
                "at": time.perf_counter(),
                "cpu": used.ru_utime + apart,
                "system": used.ru_stime,
                "active": self.progress.active_s,
                "waited": self.waited_s,
                "bytes": self.progress.moved_bytes + self.parameters.read_bytes,
            }
        )

    TieredStates.commit = marked  # type: ignore[method-assign]
    give_freed_memory_back()  # as a worker does: a heap with holes of a model that was built in it fills them all
    os.environ["TMPDIR"] = asked["folder"]
    torch.manual_seed(0)
    with mapped(asked["resident"]):
        module = Model(asked["blocks"], asked["width"])
    parameters = sum(p.numel() for p in module.parameters())
    sharding: Any = "none" if asked["tiers"] is None else {"tiers": asked["tiers"]}
    config = {
        "run": {"directory": asked["folder"] + "/runs", "display": "quiet"},
        "data": {"sequence": asked["sequence"]},
        "train": {
            "steps": asked["steps"],
            "batch": asked["batch"],
            "precision": "fp32",
            "max_grad_norm": asked["clip"],
            "evaluate_every": 0,
            "checkpoint_every": 0,
        },
        "plan": {"sharding": sharding},
        "machines": {"threads": asked["threads"]},
    }
    done = gossamer.train(module, Tokens(), config)
    return {
        "parameters": parameters,
        "losses": done.losses.tolist(),
        "marks": marks,
        "rss_peak": resident_peak_bytes() + apart_peak,  # of both processes, each with the gradients that they share
        **rate,
    }


if __name__ == "__main__":
    main()
