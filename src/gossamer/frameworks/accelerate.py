"""Hugging Face Accelerate: `prepare` in place of `accelerator.prepare`, with gradients averaged by Gossamer.

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, exchange="auto")

What follows stays as it is: `accelerator.accumulate`, `backward`, `clip_grad_norm_`, `save_state`. It is a function and
no plugin, as Accelerate has no place for one: a `KwargsHandler` of a class that it does not list is a KeyError, and its
plugins configure the back ends that `DistributedType` lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from gossamer.own_loop import wrap
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges

if TYPE_CHECKING:
    from accelerate import Accelerator

_OWNERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")  # values of DistributedType that own gradients or parameters


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    exchange: Exchanges = "dense",
    lossy: bool = False,
    loss: str = "mean",
    batch_norm: str = "rank",
    seed: int = 0,
    timeout_s: float = 120.0,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers; return them in the order given, one alone by itself.

    Equal to `accelerator.prepare` where that wraps the models in DDP. A model and the optimizers of its parameters go
    into one call. loss: "mean" weighs all ranks alike, as DDP does; "read" weighs them by what their losses count, as
    one process with the global batch. The rest as for `gossamer.wrap`. Raises BadInput.
    """
    check_accelerator(accelerator)
    models = [one for one in objects if isinstance(one, nn.Module)]
    optimizers = [one for one in objects if isinstance(one, Optimizer)]
    _check(models, optimizers)
    prepared: dict[int, Any] = {id(one): accelerator.prepare_model(one, evaluation_mode=True) for one in models}
    wrap(
        models,
        optimizers,
        exchange=exchange,
        lossy=lossy,
        loss=loss,
        batch_norm=batch_norm,
        split=False,  # a prepared loader gives each rank batches of its own
        scaler=accelerator.scaler,
        seed=seed,
        timeout_s=timeout_s,
    )
    prepared |= {id(one): accelerator.prepare(one) for one in optimizers}  # a scheduler looks for its prepared one
    prepared |= {id(one): accelerator.prepare(one) for one in objects if id(one) not in prepared}
    found = tuple(prepared[id(one)] for one in objects)
    return found if len(found) > 1 else found[0]


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise BadInput where something else than DDP would average gradients, or parameters are divided."""
    kind = str(accelerator.distributed_type.value)
    if kind in _OWNERS:
        raise bad_input(
            wanted="an Accelerator that trains with DDP or in one process",
            got=f"one of distributed type {kind}, which owns gradients or parameters itself",
            do="configure Accelerate for plain multi-CPU or multi-GPU training",
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.total_size > 1:
        raise bad_input(
            wanted="an Accelerator without a ParallelismConfig",
            got=repr(parallelism),
            do="leave parallelism_config out: Gossamer averages over all processes",
        )


def _check(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    if not models or not optimizers:
        raise bad_input(
            wanted="a model, and the optimizers of its parameters, in one call",
            got=f"{len(models)} models and {len(optimizers)} optimizers",
            do="call prepare(accelerator, model, optimizer, ...); what has no parameters goes to accelerator.prepare",
        )
    for one in (*models, *optimizers):
        if getattr(one, "_is_accelerate_prepared", False) or type(one).__name__ == "AcceleratedOptimizer":
            raise bad_input(
                wanted="models and optimizers that are not prepared yet",
                got=f"a prepared {type(one).__name__}",
                do="pass them to prepare(accelerator, ...) in place of accelerator.prepare(...)",
            )
