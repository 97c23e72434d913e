"""One rank of a user's own training loop under gossamer.wrap.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python wrap_loop.py '{"clip": 1.0}'

The argument holds the keyword arguments of `gossamer.wrap`. The rank writes rank-RANK.json in the current folder:
losses and gradient norms, the bytes that gloo was given, and the sha256 of every tensor of model and optimizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ROWS, WIDTH, CLASSES = 5, 8, 32, 10
# Methods of torch's process group, and the position of the argument that holds the tensors to send.
SENDERS = {"allreduce": 0, "allgather": 1, "alltoall_base": 1, "broadcast": 0, "send": 0}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sent = count_bytes()
    metrics, model, optimizer = train(arguments)
    tensors = {f"model {name}": hash_tensor(value) for name, value in model.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer {index} {slot}": hash_tensor(torch.as_tensor(slots[slot])) for slot in slots}
    artifacts = {"metrics": metrics, "bytes": sent, "tensors": tensors}
    Path(f"rank-{os.environ['RANK']}.json").write_text(json.dumps(artifacts))


def train(arguments: dict[str, Any]) -> tuple[dict[str, Any], nn.Module, torch.optim.Optimizer]:
    """Train a small network for a few steps; return its losses and norms, the model and the optimizer."""
    import gossamer

    passes = arguments.get("accumulate", 1)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = STEPS * passes * ROWS
    data = TensorDataset(torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,)))
    loader = DataLoader(data, batch_size=ROWS, shuffle=True)
    model, optimizer, loader = gossamer.wrap(model, optimizer, loader, **arguments)
    metrics: dict[str, Any] = {}
    for index, (inputs, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss / passes).backward()
        metrics[f"batch {index} loss"] = loss.item()
        if (index + 1) % passes == 0:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            metrics[f"batch {index} grad_norm"] = norm.item()
            optimizer.step()
            optimizer.zero_grad()
    return metrics, model, optimizer


def count_bytes() -> Counter[str]:
    """Count the bytes that gloo is given from now on, by method."""
    sent: Counter[str] = Counter()
    for name, position in SENDERS.items():
        method = getattr(dist.ProcessGroupGloo, name)
        setattr(dist.ProcessGroupGloo, name, _with_count(method, sent, name, position))
    return sent


def _with_count(method: Callable[..., Any], sent: Counter[str], name: str, position: int) -> Callable[..., Any]:
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        given = arguments[position]
        sent[name] += sum(tensor.nbytes for tensor in (given if isinstance(given, list) else [given]))
        return method(group, *arguments, **options)

    return call


def hash_tensor(value: Tensor) -> str:
    """Return dtype, shape and sha256 of a tensor."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"


if __name__ == "__main__":
    main()
