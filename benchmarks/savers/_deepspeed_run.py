"""One run of benchmarks/savers/tiers.py under DeepSpeed's ZeRO-Infinity, and its figures as one JSON line.

PEER_PYTHON _deepspeed_run.py '{"folder": ..., "blocks": ..., "width": ..., "steps": ..., ...}'

Parameters, gradients and optimizer states are offloaded to files of `folder`, on the CPU as the only device. The model
and the rows are those of _tiers_run.py, so that a step is as much work. Rows come in their order and the rate is
constant, so its losses say that it learns, and compare nothing. It runs in an environment with torch and deepspeed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

_BUFFER = 1 << 23  # numbers of the largest parameter, twice: 4 x width^2 of the large model are 2^22
_PORT = "29533"


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["cgroup"]:  # before anything is imported: all of it counts
        Path(asked["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": str(asked["threads"])}
    os.environ["DS_ENV_FILE"] = os.devnull
    print(json.dumps(run(asked)))


def settings(asked: dict[str, Any]) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": asked["folder"], "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": asked["batch"],
        "gradient_clipping": asked["clip"],
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**place, "buffer_count": 4},
            "offload_param": {**place, "buffer_count": 5, "buffer_size": _BUFFER, "max_in_cpu": 0},
            "sub_group_size": _BUFFER,
            "reduce_bucket_size": _BUFFER,
            "stage3_prefetch_bucket_size": _BUFFER,
            "stage3_max_live_parameters": 2 * _BUFFER,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 10_000,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
    }


def run(asked: dict[str, Any]) -> dict[str, Any]:
    import deepspeed
    import torch
    from _tiers_model import Model, row
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"])
    given = settings(asked)
    deepspeed.init_distributed("gloo", verbose=False)
    with deepspeed.zero.Init(config_dict_or_path=given):  # with a dtype it would take bfloat16 on a CPU
        module = Model(asked["blocks"], asked["width"])
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=given)
    losses, ended = [], [time.perf_counter()]
    for step in range(asked["steps"]):
        first = step * asked["batch"]
        ids = torch.stack([row(first + index, asked["sequence"]) for index in range(asked["batch"])])
        loss = nn.functional.cross_entropy(engine(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        ended.append(time.perf_counter())
    return {
        "version": deepspeed.__version__,
        "dtype": str(next(module.parameters()).dtype),
        "parameters": sum(one.ds_numel for one in module.parameters()),
        "losses": losses,
        "ended": ended,
        "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
