"""torchft on the CPU: every host a replica group of one, the lighthouse on host 0, gloo between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from links.method import KNOWN
from links.peers import Peer, adamw, own_address

_PORT = 29411
_PATIENCE = timedelta(seconds=600)


class _Managed(Peer):
    """Under its Manager, one for every host."""

    def __init__(self, module: nn.Module) -> None:
        import torchft

        self.version = f"torchft {version('torchft')}"
        rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._lighthouse = _lighthouse(hosts) if rank == 0 else None
        self._module = module
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=_PATIENCE),
            min_replica_size=hosts,
            load_state_dict=lambda state: module.load_state_dict(state),
            state_dict=module.state_dict,
            rank=0,
            world_size=1,
            replica_id=f"host{rank}",
            store_addr=own_address(),
            store_port=self._store.port,
            lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{_PORT}",
            hostname=own_address(),
            timeout=_PATIENCE,
            quorum_timeout=_PATIENCE,
            init_sync=False,
            use_async_quorum=self.use_async_quorum,
        )

    use_async_quorum = True

    def finish(self) -> None:
        time.sleep(1.0)  # the others' last words
        self._manager.shutdown(wait=False)
        if self._lighthouse is not None:
            self._lighthouse.kill()
            self._lighthouse.wait()
        os._exit(0)


class Torchft(_Managed):
    """Its DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        import torchft

        super().__init__(module)
        self._model = torchft.DistributedDataParallel(self._manager, module)
        self._optimizer = torchft.Optimizer(self._manager, adamw(module))

    def step(self, batch: dict[str, Tensor]) -> float:
        self._optimizer.zero_grad()  # asks for the quorum
        loss = self._model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        assert self._manager.num_participants() == int(os.environ["WORLD_SIZE"]), "a replica is missing"
        return float(loss.item())


class Apart(_Managed):
    """Its LocalSGD, or its DiLoCo with one fragment, as often as ours: see links.method."""

    use_async_quorum = False  # as both of them want it

    def __init__(self, module: nn.Module, name: str) -> None:
        from torchft import local_sgd

        super().__init__(module)
        self._optimizer, every = adamw(module), KNOWN[name].period
        if name == "torchft_local_sgd":
            self._loop = local_sgd.LocalSGD(self._manager, module, self._optimizer, every)
        else:
            outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            self._loop = local_sgd.DiLoCo(self._manager, [module], self._optimizer, outer, every, pin_memory=False)
        self._loop.__enter__()

    def step(self, batch: dict[str, Tensor]) -> float:
        self._optimizer.zero_grad()
        loss = self._module(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.item())


def _lighthouse(hosts: int) -> subprocess.Popen[bytes]:
    program = Path(sys.executable).parent / "torchft_lighthouse"
    argv = [str(program), "--min_replicas", str(hosts), "--bind", f"0.0.0.0:{_PORT}"]
    started = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1.0)
    return started
