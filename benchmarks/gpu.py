"""What needs a GPU: throughput and MFU against a hand-written loop, NCCL with a process per GPU, kernels of codecs.

    python benchmarks/gpu.py [--pairs 5] [--steps 30]
    python benchmarks/gpu.py --codecs [--numel 16777216] [--repeats 20]

Both sides train the same Llama under bf16 autocast with the same batch; they take turns, each round in a fresh
process. MFU counts 6 x parameters flop per token against the measured rate of large bf16 matrix products. With
several GPUs the same is run with one process on each over NCCL against DistributedDataParallel; with one GPU a single
NCCL rank runs, which proves the path and measures nothing.

With --codecs only Triton's kernels beside torch's passes (`gpu_codecs.py`): whether they give the same bits and what
they take, under `codecs` in the record, the rest of which stays. It ends with an error where bits differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from statistics import median

import rounds
from result import publish, publish_part, ratio, recorded

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 1024,
}
BATCH, SEQUENCE, WARM = 16, 1024, 8  # batch per GPU


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--pairs", type=int, default=5)
    read.add_argument("--steps", type=int, default=30)
    read.add_argument("--round", choices=["theirs", "ours"])
    read.add_argument("--codecs", action="store_true")
    read.add_argument("--numel", type=int, default=1 << 24)
    read.add_argument("--repeats", type=int, default=20)
    asked = read.parse_args()
    if asked.round:
        (theirs if asked.round == "theirs" else ours)(asked.steps)
        return
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("no GPU here: this benchmark measures nothing without one")
    if asked.codecs:
        compare_codecs(asked.numel, asked.repeats)
        return
    peak = matmul_flop_per_s()
    figures = {"gpus": gpus, "matmul_flop_per_s": peak}
    for ranks in sorted({1, gpus}):
        found: dict[str, list[dict[str, float]]] = {"theirs": [], "ours": []}
        for pair in range(asked.pairs):
            for name in sorted(found, reverse=pair % 2 == 1):
                found[name].append(rounds.one_round(__file__, name, ranks=ranks, steps=asked.steps, env={}))
                print(ranks, name, found[name][-1], file=sys.stderr, flush=True)
        speed = {name: [r["tokens_per_s"] for r in some] for name, some in found.items()}
        compared = ratio(speed["ours"], speed["theirs"])
        flop = 6 * found["ours"][0]["parameters"]
        figures[f"gpus_{ranks}"] = {
            "ratio": compared["median"],
            "pairs": compared["pairs"],
            "tokens_per_s": {name: round(median(some)) for name, some in speed.items()},
            "mfu": {name: round(median(some) * flop / (peak * ranks), 4) for name, some in speed.items()},
            "peak_bytes": {name: median(r["peak_bytes"] for r in some) for name, some in found.items()},
        }
    publish("gpu", {**{k: v for k, v in recorded("gpu").items() if k == "codecs"}, **figures})


def compare_codecs(numel: int, repeats: int) -> None:
    """Record the kernels of codecs beside torch's passes; exit with an error where bits differ."""
    import torch

    import gpu_codecs

    found = gpu_codecs.rows(torch.device("cuda", 0), numel, repeats)
    publish_part("gpu", "codecs", {"numel": numel, "repeats": repeats, "rows": found})
    wrong = [name for name, row in found.items() if not row["same_bits"] or row["bytes_as_on_cpu"] is False]
    if wrong or any(row["refused"] for row in found.values()):
        sys.exit(f"other bits: {wrong}; kernels refused: {[name for name, row in found.items() if row['refused']]}")


def matmul_flop_per_s() -> float:
    """The best of several 8192-cubed bf16 products."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        best = max(best, 2 * 8192**3 / (time.perf_counter() - began))
    return best


def tokens() -> rounds.Tokens:
    return rounds.Tokens(2048, SEQUENCE, MODEL["vocab_size"])


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODEL, use_cache=False))


def report(times: list[float], ranks: int, parameters: int) -> None:
    import torch

    steady = times[WARM:]
    tokens = BATCH * ranks * SEQUENCE * len(steady)
    figures = {"tokens_per_s": tokens / sum(steady), "parameters": parameters}
    print(json.dumps({**figures, "peak_bytes": torch.cuda.max_memory_allocated()}))


def theirs(steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    module, data = llama().cuda(), tokens()
    model = module
    if ranks > 1:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        first = ((step * ranks + rank) * BATCH) % (len(data) - BATCH)
        batch = torch.utils.data.default_collate([data[first + i] for i in range(BATCH)])
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - began)
    report(times, ranks, sum(p.numel() for p in module.parameters()))
    if ranks > 1:
        dist.destroy_process_group()


def ours(steps: int) -> None:
    import gossamer

    ranks = int(os.environ["WORLD_SIZE"])
    module = llama()
    config = {
        "train": {
            "steps": steps,
            "batch": BATCH * ranks,
            "accumulate": 1,
            "precision": "bf16",
            "optimizer": {"adamw": {"lr": 3e-4, "weight_decay": 0.01}},
            "lr_schedule": "constant",
            "evaluate_every": 0,
            "checkpoint_every": 0,
        },
        "data": {"sequence": SEQUENCE},
        "run": rounds.run_section(),
    }
    gossamer.train(module, tokens(), config)
    if os.environ["RANK"] == "0":
        report(rounds.step_times(), ranks, sum(p.numel() for p in module.parameters()))


if __name__ == "__main__":
    main()
