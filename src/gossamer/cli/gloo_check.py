"""The worker process of the doctor's gloo check: `python -m gossamer.cli.gloo_check RANK FOLDER`, started twice."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gossamer.cli.doctor import RANKS, TIMEOUT_S
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.message import Collective, Message, ProcessGroups


def smoke(rank: int, folder: Path) -> bool:
    """Return whether the two ranks, with a rendezvous in `folder`, got the right sum from one all-reduce."""
    store = dist.FileStore(str(folder / "meeting"), RANKS)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    group = ProcessGroupChannel(
        Rendezvous(store=store, rank=rank, levels=ProcessGroups.flat(RANKS), timeout_s=TIMEOUT_S)
    )
    (total,) = group.start(Message((torch.full((4,), float(rank + 1)),), Collective.SUM)).wait()
    right = bool((total == 3.0).all())
    store.set(f"done{rank}", "1")  # a process that exits first closes its sockets under the other
    store.wait([f"done{other}" for other in range(RANKS)])
    group.close()
    return right


if __name__ == "__main__":
    sys.exit(0 if smoke(int(sys.argv[1]), Path(sys.argv[2])) else 1)
