"""Hugging Face's Trainer: a callback that averages the gradients.

    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(GossamerCallback(trainer, exchange="auto"))
    trainer.train()

Start the script with torchrun, as with DDP. A callback is not told its trainer, and runs when training begins, after
the model was wrapped in DDP. So it is constructed with the trainer, and tells its Accelerator to leave DDP out.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from gossamer.frameworks.accelerate import check_accelerator
from gossamer.own_loop import wrap
from gossamer.own_loop.gradient_hooks import release
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges

if TYPE_CHECKING:
    from transformers import Trainer


class GossamerCallback(TrainerCallback):  # type: ignore[misc]
    """A callback of the trainer that it is constructed with; equal to the Trainer's own DDP.

    Each rank's gradient has the same weight, as the Trainer scales each rank's loss for a plain mean over ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        exchange: Exchanges = "dense",
        lossy: bool = False,
        batch_norm: str = "rank",
        seed: int = 0,
        timeout_s: float = 120.0,
    ) -> None:
        """Take the gradients of `trainer` over. The settings are those of `gossamer.wrap`. Raises BadInput."""
        _check(trainer)
        self._trainer = trainer
        self._settings: dict[str, Any] = {
            "exchange": exchange,
            "lossy": lossy,
            "batch_norm": batch_norm,
            "seed": seed,
            "timeout_s": timeout_s,
        }
        _leave_ddp_out(trainer.accelerator)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Wrap model and optimizer, which the trainer has prepared, and loaded from its checkpoint."""
        trainer = self._trainer
        if isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel):
            raise BadInput(
                "the trainer has wrapped its model in DistributedDataParallel, which averages gradients as well: "
                "construct GossamerCallback(trainer) before trainer.train(), and again after a hyperparameter search"
            )
        optimizer = trainer.optimizer
        wrap(
            trainer.model,
            getattr(optimizer, "optimizer", optimizer),  # the one inside of Accelerate's
            loss="mean",
            split=False,  # the Trainer's loader gives each rank rows of its own
            scaler=trainer.accelerator.scaler,
            **self._settings,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let the model go: a backward pass after training is this rank's own again."""
        model = self._trainer.model
        if isinstance(model, nn.Module):
            release(model)


def _leave_ddp_out(accelerator: Any) -> None:
    """Let an Accelerator prepare models as for evaluation, which is its word for "without DDP"."""
    plain = accelerator.prepare_model
    if isinstance(plain, partial):
        return  # by an earlier callback
    accelerator.prepare_model = partial(_prepared, plain)


def _prepared(plain: Any, model: nn.Module, *rest: Any, **given: Any) -> Any:
    device_placement = rest[0] if rest else given.get("device_placement")
    return plain(model, device_placement=device_placement, evaluation_mode=True)


def _check(trainer: Trainer) -> None:
    """Raise BadInput for what is no Trainer, and where something else than DDP would average gradients."""
    if not hasattr(trainer, "accelerator") or not hasattr(trainer, "model_wrapped"):
        raise bad_input(
            wanted="a transformers.Trainer",
            got=f"{type(trainer).__name__}: {trainer!r:.60}",
            do="construct the Trainer first, then trainer.add_callback(GossamerCallback(trainer))",
        )
    check_accelerator(trainer.accelerator)
    if trainer.args.n_gpu > 1:
        raise bad_input(
            wanted="one process per GPU",
            got=f"one process with {trainer.args.n_gpu} GPUs, for which the Trainer uses DataParallel",
            do="start the script with torchrun --nproc-per-node N, or make one GPU visible (CUDA_VISIBLE_DEVICES=0)",
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise bad_input(
            wanted="a model whose parameters are whole on every rank",
            got="one that was loaded in parts (distributed_config)",
            do="load it without distributed_config",
        )
