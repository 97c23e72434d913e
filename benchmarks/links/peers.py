"""Other people's data parallelism on the CPU and gloo, each as one thing that makes a step."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from links import setting

_PATIENCE = timedelta(seconds=600)


class Peer(ABC):
    """One rank of a peer's run."""

    version: str

    @abstractmethod
    def step(self, batch: dict[str, Tensor]) -> float:
        """One training step; the loss of this rank's part."""

    def finish(self) -> None:
        """Leave, together with the others."""
        dist.destroy_process_group()


def start(name: str, module: nn.Module) -> Peer:
    """The peer of a row."""
    if name.startswith("zero"):
        from links.deepspeed_peer import Zero

        return Zero(module, stage=int(name[-1]))
    if name.startswith("torchft"):
        from links import torchft_peer

        return torchft_peer.Torchft(module) if name == "torchft" else torchft_peer.Apart(module, name)
    return Ddp(module, name)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """What every loop updates with."""
    decay = setting.WEIGHT_DECAY
    return torch.optim.AdamW(module.parameters(), lr=setting.LR, betas=setting.BETAS, weight_decay=decay, fused=True)


class Ddp(Peer):
    """DistributedDataParallel, as it is or with one of its hooks; `no_exchange` is the same loop without it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.version = f"torch {torch.__version__}"
        self._module, self._optimizer = module, adamw(module)
        dist.init_process_group("gloo", timeout=_PATIENCE)
        self._model = module if name == "no_exchange" else self._wrapped(module, name)

    @staticmethod
    def _wrapped(module: nn.Module, name: str) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        model = DistributedDataParallel(module, bucket_cap_mb=1000 if name.endswith("one_bucket") else None)
        if name == "ddp_fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if name.startswith("ddp_powersgd"):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def step(self, batch: dict[str, Tensor]) -> float:
        loss = self._model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), setting.CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.item())


def own_address() -> str:
    """This host's address in the laboratory."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])
