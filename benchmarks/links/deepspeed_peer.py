"""DeepSpeed's ZeRO on the CPU: `torch_adam`, because its own needs a compiler, and DS_ACCELERATOR=cpu."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn

from links import setting
from links.peers import Peer


class Zero(Peer):
    """One engine of stage 0 to 3, in float32."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # hosts share no memory, nor a compiler's lock
        self.version = f"deepspeed {deepspeed.__version__}"
        adam = {"lr": setting.LR, "betas": list(setting.BETAS), "weight_decay": setting.WEIGHT_DECAY}
        config = {
            "train_micro_batch_size_per_gpu": setting.ROWS,
            "gradient_clipping": setting.CLIP,
            "optimizer": {"type": "AdamW", "params": {**adam, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }
        deepspeed.init_distributed("gloo")
        self._engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.item())

    def finish(self) -> None:
        dist.barrier()  # its own way out differs from stage to stage
        os._exit(0)
