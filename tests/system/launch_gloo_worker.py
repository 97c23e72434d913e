"""A worker over a plain gloo group, for launching tests: python launch_gloo_worker.py none|kill."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from gossamer.comm.channel.store import join_store
from gossamer.launch import Ready, run_worker


def main(ready: Ready) -> None:
    place = ready.place
    at, is_keeper = place.master, place.rank == 0
    store = join_store(at.host, at.port, place.ranks, is_keeper=is_keeper, timeout_s=60.0, listener=at.listener)
    store = dist.PrefixStore(f"generation-{place.start.generation}", store)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=timedelta(seconds=60))
    for step in range(4):
        ready.heartbeat.at(step=step, phase="exchange", op="all_reduce", sequence=step)
        if place.rank == 1 and step == 2 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([float(place.rank + 1)])
        dist.all_reduce(total)
        assert total.item() == place.ranks * (place.ranks + 1) / 2
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_worker(main))
