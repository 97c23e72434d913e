"""Lightning: a strategy that averages gradients by Gossamer, in place of `strategy="ddp"`.

    from gossamer.frameworks.lightning import GossamerStrategy

    trainer = lightning.Trainer(strategy=GossamerStrategy(exchange="auto"), devices=2, num_nodes=2)
    trainer.fit(module, loader)

It is Lightning's DDPStrategy without DistributedDataParallel: launcher, process group, samplers, reduction of metrics
and checkpoints are Lightning's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gossamer.own_loop import wrap
from gossamer.own_loop.gradient_hooks import release
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges


class GossamerStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy whose result equals that of DDPStrategy, or that of one process with the global batch."""

    def __init__(
        self,
        *,
        exchange: Exchanges = "dense",
        lossy: bool = False,
        loss: str = "mean",
        batch_norm: str = "rank",
        seed: int = 0,
        timeout_s: float = 120.0,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        """loss: "mean" weighs all ranks alike, as DDP does; "read" weighs them by what their losses count, as one
        process. `exchange` to `timeout_s` as for `gossamer.wrap`, the rest as for DDPStrategy.
        """
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            timeout=timedelta(seconds=max(timeout_s, 1800.0)),  # Lightning's; the one of `wrap` ends before it
        )
        self._settings: dict[str, Any] = {
            "exchange": exchange,
            "lossy": lossy,
            "loss": loss,
            "batch_norm": batch_norm,
            "seed": seed,
            "timeout_s": timeout_s,
        }

    def configure_ddp(self) -> None:
        """Leave the module as it is: Lightning calls this to wrap it in DistributedDataParallel."""

    def setup(self, trainer: Trainer) -> None:
        """Set up as DDPStrategy, then hand the gradients to `gossamer.wrap`. Raises BadInput."""
        if self._layer_sync is not None:
            raise bad_input(
                wanted="a Trainer without sync_batchnorm",
                got="sync_batchnorm=True",
                do="pass GossamerStrategy(batch_norm='all'), which takes BatchNorm's statistics over all ranks' rows",
            )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            wrap(
                self._module(),
                list(self.optimizers),
                split=False,  # Lightning's sampler gives each rank rows of its own
                scaler=getattr(self.precision_plugin, "scaler", None),
                **self._settings,
            )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the backward passes inside, and send them with the next one outside."""
        with self._module().no_sync():
            yield

    def teardown(self) -> None:
        """Let the module go, then tear down as DDPStrategy: a backward pass afterwards is this rank's own again."""
        if self.lightning_module is not None:
            release(self.lightning_module)
        super().teardown()

    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise BadInput("GossamerStrategy is not connected to a module: pass it to a Trainer and call trainer.fit")
        return module
