"""TPI-LLM (Li et al., arXiv 2410.00531): on far links two hops through a hub beat the 2 (n-1) of a ring.

The published figure is what the paper's model of both makes of the setting: a ring takes 2 (n-1) a + 2 (n-1)/n S/B, a
star 2 a + 2 (n-1) S/B, with a one way and S bytes at B per second. gloo's all-reduce, the ring here, waits for its
neighbor's word before every hop, so it takes more than that; and beyond about 14 KB a far TCP stream begins slowly.
Timed are blocks of exchanges one behind the other, methods in turns, the slowest host of every block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from claims import Row, Study
from claims._trials import Trials
from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import Bucket, Layout
from gossamer.comm.channel.group import ProcessGroupChannel, Rendezvous
from gossamer.comm.message import ExchangeContext, ProcessGroups
from gossamer.exchange.star import star_pays
from gossamer.netlab import Lab, LabTopology

RATE_BYTES_PER_S, DELAY_S, CALLS = 300e6 / 8, 0.01, 4
METHODS = ("all_reduce", "reduce_broadcast", "star", "recursive_doubling")  # two of gloo, two of ours


def studies(*, quick: bool) -> list[Study]:
    """Small messages on 4 and 8 hosts, and one on the other side of the crossover."""
    sizes_kib, blocks = ([4, 1024], 3) if quick else ([4, 64, 1024], 7)
    return [Study(f"hosts_{hosts}", partial(rows, hosts, sizes_kib, blocks)) for hosts in (4, 8)]


def rows(hosts: int, sizes_kib: list[int], blocks: int, trials: Trials) -> list[Row]:
    found = trials(f"{sizes_kib} KiB, {blocks} blocks", partial(on_hosts, hosts, sizes_kib, blocks))
    return [
        row(
            hosts,
            kib,
            {m: [max(t) for t in zip(*(host[f"{kib} {m}"] for host in found), strict=True)] for m in METHODS},
        )
        for kib in sizes_kib
    ]


def on_hosts(hosts: int, sizes_kib: list[int], blocks: int) -> list[dict[str, list[float]]]:
    """Return the seconds per exchange of every block, by message and method, of every host."""
    said: list[str] = []
    code = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    path = {"PYTHONPATH": code, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "claims.star", json.dumps([sizes_kib, blocks])]
    with Lab(LabTopology(hosts, rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S)) as lab:
        codes = lab.run(command, env=lambda host: path, output=lambda host, line: said.append(line))
    assert not any(codes), "\n".join(said[-20:])
    return [json.loads(line) for line in said if line.startswith("{")]


def row(hosts: int, kib: int, blocks: dict[str, list[float]]) -> Row:
    """`blocks`: seconds per exchange by method."""
    ring, star = predicted(hosts, kib * 1024)
    ratios = sorted(a / b for a, b in zip(blocks["all_reduce"], blocks["star"], strict=True))
    return Row(
        method="star",
        claim="how many times as fast an exchange is by a star as by a ring; holds: more or less than 1 as predicted",
        baseline="gloo's all-reduce",
        ratio=round(median(ratios), 2),
        paper_ratio=round(ring / star, 2),
        spread=(round(ratios[0], 2), round(ratios[-1], 2)),
        seeds=len(ratios),
        setting=f"{kib} KiB, {hosts} hosts, 300 Mbit/s, 10 ms one way",
        holds=(median(ratios) > 1) == (ring > star),
        details={
            "star_pays": star_pays(kib * 1024, hosts, latency_s=DELAY_S, bytes_per_s=RATE_BYTES_PER_S),
            "predicted_s": {"ring": round(ring, 4), "star": round(star, 4)},
            "seconds": {method: round(median(each), 4) for method, each in blocks.items()},
        },
    )


def predicted(hosts: int, nbytes: int) -> tuple[float, float]:
    """Seconds by ring and by star, as the paper counts them."""
    wire_s = nbytes / RATE_BYTES_PER_S
    return 2 * (hosts - 1) * (DELAY_S + wire_s / hosts), 2 * DELAY_S + 2 * (hosts - 1) * wire_s


def host(sizes_kib: list[int], blocks: int) -> None:
    """One rank; its last line is one JSON object."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, ranks, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    levels = ProcessGroups.flat(ranks)
    channel = ProcessGroupChannel(
        Rendezvous(store, rank, levels, interface=os.environ["GLOO_SOCKET_IFNAME"], timeout_s=60.0)
    )
    dist.init_process_group("gloo", store=dist.PrefixStore("peer", store), rank=rank, world_size=ranks)
    at = ExchangeContext(rank, levels, torch.full((ranks,), 1 / ranks, dtype=torch.float64), (0, 0), 0.1)
    found: dict[str, list[float]] = {}
    for kib in sizes_kib:
        calls = {f"{kib} {method}": call(method, channel, at, kib * 256) for method in METHODS}
        for _ in range(blocks + 1):
            for name, one in calls.items():
                found.setdefault(name, []).append(seconds_of(one))
    print("\n" + json.dumps({name: each[1:] for name, each in found.items()}), flush=True)  # the first connects
    dist.barrier()
    if rank == 0:
        time.sleep(1.0)  # the store is served from here


def seconds_of(one: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        one()
    return (time.perf_counter() - began) / CALLS


def call(method: str, channel: ProcessGroupChannel, at: ExchangeContext, numel: int) -> Callable[[], object]:
    """One exchange of `numel` float32, to its end."""
    x = torch.ones(numel)
    if method == "all_reduce":
        return lambda: dist.all_reduce(x)
    if method == "reduce_broadcast":
        return lambda: (dist.reduce(x, 0), dist.broadcast(x, 0))
    one, where = exchange_methods.build(method), Layout.of({"x": x})

    def exchange() -> None:
        run, reply = one.run(Bucket(where, x), one.init(where), at), None
        try:
            while True:
                reply = channel.start(next(run) if reply is None else run.send(reply)).wait()
        except StopIteration:
            return

    return exchange


if __name__ == "__main__":
    host(*json.loads(sys.argv[1]))
