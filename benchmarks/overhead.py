"""What Gossamer costs: tokens/s and peak memory against hand-written loops, same model, data, threads, in one run.

    python benchmarks/overhead.py [--pairs 7] [--steps 12]

Single process: a plain torch loop. Two processes: DistributedDataParallel over gloo. Ours runs through the same
trainer as `gossamer train` (player, buckets, pump, agreement, records). Each round is a fresh process; ours and
theirs take turns; the ratio is the median over pairs. Memory is the peak resident size of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from statistics import median

import rounds
from peak import resident_peak_bytes
from result import publish, ratio

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
BATCH, SEQUENCE = 16, 128
WARM = 3  # steps left out at the start


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--pairs", type=int, default=7)
    read.add_argument("--steps", type=int, default=12)
    read.add_argument("--round", choices=["plain", "ddp", "ours"])
    asked = read.parse_args()
    if asked.round:
        {"plain": plain, "ddp": ddp, "ours": ours}[asked.round](asked.steps)
        return
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ("plain", "ours1", "ddp", "ours2")}
    for pair in range(asked.pairs):
        for name in sorted(figures, reverse=pair % 2 == 1):  # who goes first alternates
            figures[name].append(one_round(name, asked.steps))
            print(f"{pair} {name:6s} {figures[name][-1]}", file=sys.stderr, flush=True)
    speed = {name: [r["tokens_per_s"] for r in some] for name, some in figures.items()}
    peak = {name: median(r["peak_bytes"] for r in some) for name, some in figures.items()}
    single, double = ratio(speed["ours1"], speed["plain"]), ratio(speed["ours2"], speed["ddp"])
    publish(
        "overhead",
        {
            "ratio_single": single["median"],
            "ratio_ddp": double["median"],
            "ratio_memory": round(peak["ours2"] / peak["ddp"], 4),
            "ratio_memory_single": round(peak["ours1"] / peak["plain"], 4),
            "pairs_single": single["pairs"],
            "pairs_ddp": double["pairs"],
            "tokens_per_s": {name: round(median(values), 1) for name, values in speed.items()},
            "peak_bytes": peak,
        },
    )


def one_round(name: str, steps: int) -> dict[str, float]:
    """Run a round in fresh processes; rank 0's figures."""
    ranks = 2 if name in ("ddp", "ours2") else 1
    env = environment(ranks)
    return rounds.one_round(__file__, name.rstrip("12"), ranks=ranks, steps=steps, env=env, limit_s=600)


def environment(ranks: int) -> dict[str, str]:
    """The variables of ranks that share this machine's cores."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads)}


def tokens() -> rounds.Tokens:
    return rounds.Tokens(4096, SEQUENCE, MODEL["vocab_size"])


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False))


def report(times: list[float]) -> None:
    peak = resident_peak_bytes()
    steady = times[WARM:]
    print(json.dumps({"tokens_per_s": BATCH * SEQUENCE * len(steady) / sum(steady), "peak_bytes": peak}))


def hand_written(steps: int, wrap) -> None:
    """The loop a careful user would write: fused AdamW, clipping, one loss.item() a step for the log."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module, data, mine = llama(), tokens(), BATCH // ranks
    model = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        rows = [data[step * BATCH + rank * mine + i] for i in range(mine)]
        batch = torch.utils.data.default_collate(rows)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began)
    report(times)


def plain(steps: int) -> None:
    hand_written(steps, lambda module: module)


def ddp(steps: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    hand_written(steps, DistributedDataParallel)
    dist.destroy_process_group()


def ours(steps: int) -> None:
    import gossamer

    config = {
        "train": {
            "steps": steps,
            "batch": BATCH,
            "optimizer": {"adamw": {"lr": 3e-4, "weight_decay": 0.01}},
            "lr_schedule": "constant",
            "evaluate_every": 0,
            "checkpoint_every": 0,
        },
        "data": {"sequence": SEQUENCE},
        "run": rounds.run_section(),
    }
    gossamer.train(llama(), tokens(), config)
    if os.environ["RANK"] == "0":
        report(rounds.step_times())


if __name__ == "__main__":
    main()
