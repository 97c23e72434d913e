"""`gossamer.wrap`: somebody's own loop on several processes, with one new line.

    model, optimizer, loader = gossamer.wrap(model, optimizer, loader)      # the only new line
    for batch in loader:                                                    # this rank's rows of every batch
        loss = model(**batch).loss
        loss.backward()                                                     # .grad is the mean of all ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)             # so everything that follows is as in one
        optimizer.step()                                                    # a transaction of all ranks
        optimizer.zero_grad()

Every rank runs the same script (torchrun, srun, mpirun, `gossamer lab run`, or variables set by hand); alone it is the
same with one rank. The numbers are those of one process with the whole batch, or it is said, before anything moved, why
not: the modules of this room each hold one part of that contract.

    reading    what a loss counts, from its graph             roots     whose backward pass it is
    passes     a pass ends with the mean of all ranks         rows      what ranks tell each other, and must agree on
    batches    a rank's rows of a batch of any form           loader    the same batches on all ranks
    steps      the optimizer's step as a transaction          at_hand   which batch a pass is of
    meeting    where ranks meet, and who is missing           beginning what all ranks start from
    in_turn    exchanges of one message, without a thread     trained   what is trained, as that changes
    own_rows   loading no more than a rank needs
    choosing   exchange="auto"                                batch_norm statistics over all ranks
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm.channel import Channel
from gossamer.comm.comm_thread import CommThread
from gossamer.own_loop.backward_passes import AUTO, BackwardPasses, PassSettings
from gossamer.own_loop.batch_norm import over_all_ranks, with_statistics
from gossamer.own_loop.batches import BatchDims, Divider, is_time_major
from gossamer.own_loop.optimizer_step import OptimizerSteps
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup, parts_of, party
from gossamer.own_loop.rank_loader import RankDataLoader, refuse_sampler, rows_of
from gossamer.own_loop.startup import check_models, check_optimizers, start_alike, tensors_of
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.plan.law import check_loop
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges

_log = logging.getLogger(__name__)


def wrap(
    model: Any,
    optimizer: Any,
    loader: Iterable[Any] | None = None,
    *,
    exchange: Exchanges = "dense",
    lossy: bool = False,
    share: list[float] | None = None,
    clip: float = 0.0,
    accumulate: int = 1,
    weight: Callable[[Any], float] | None = None,
    loss: str = "read",
    rows: BatchDims = None,
    split: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    batch_norm: str = "rank",
    seed: int = 0,
    timeout_s: float = 120.0,
) -> tuple[Any, Any, Any]:
    """The same model and optimizer, whose gradients are those of all ranks, and a loader that gives this rank its rows.

    Several models and optimizers may come as lists, and come back so. Raises BadInput, PeerLost; so do backward and
    step, before any parameter has moved.

    exchange: a method of `compress`, or "auto", which chooses after the first steps by the links between hosts; it may
    lose something where `lossy`. share: part of every batch per rank (default equal). clip: largest global gradient
    norm, 0 for none. accumulate: backward passes before each step that are exchanged as one (`model.no_sync()` does the
    same by hand). weight: what a batch counts in a mean over it, as a function of it; loss: "read" from its graph, else
    "mean" (over what `weight` gives, or rows) or "sum". rows: which dimension of which tensor has rows, where that
    cannot be found. split: False where every rank's loader gives its own data. scaler: the GradScaler of the loop, for
    exchanges that keep residuals. batch_norm: "rank" or "all", whose rows BatchNorm's statistics are of. seed: of
    exchanges that draw.
    """
    models, optimizers = _several(model), [one for one in _several(optimizer) if one is not None]
    check_models(models)
    check_optimizers(optimizers)
    _check(clip=clip, accumulate=accumulate, loss=loss, weight=weight, batch_norm=batch_norm)
    if loader is not None and split:
        refuse_sampler(loader)
    whole = party(timeout_s)
    parts = parts_of(share, whole.ranks)
    if exchange == AUTO and whole.hosts == 1:
        exchange = "dense"  # every process is on this machine
    check_loop(exchange=exchange, clip=clip)  # also where this process is alone
    hand = PassInputs(weight, divides=split)
    passes: list[BackwardPasses] = []
    if whole.ranks > 1:
        manner = PassSettings(
            accumulate=accumulate, loss=loss, seed=seed, lossy=lossy, scale=scaler.get_scale if scaler else None
        )
        passes = _met(models, optimizers, exchange, whole, hand, manner)
        _mind_batch_norm(models, passes, whole, batch_norm)
    for one in optimizers:
        mine = [p for p in passes if _moves(one, p)]
        OptimizerSteps(one, mine, clip, _buffers(models))
        hand.know(one)
        for each in mine:
            each.rate = _Rate(weakref.ref(one))
    for index, one in enumerate(models):
        object.__setattr__(one, "no_sync", NoSync(passes[index] if passes else None))
    divider = _divider(loader, models, whole, parts, rows) if split else None
    ahead = accumulate > 1
    wrapped = RankDataLoader(loader, hand, whole, divider, looks_ahead=ahead) if loader is not None else None
    return model, optimizer, wrapped


def _buffers(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """What should be the same on all ranks beside what is trained: frozen parameters, and all buffers but BatchNorm's,
    of which it is said.
    """
    frozen: dict[str, torch.Tensor] = {
        name: p for model in models for name, p in model.named_parameters() if not p.requires_grad
    }
    held = {
        f"{name}.{own}".lstrip("."): buffer
        for model in models
        for name, layer in model.named_modules()
        if not isinstance(layer, nn.modules.batchnorm._NormBase)
        for own, buffer in layer.named_buffers(recurse=False)
    }
    return held | frozen


class NoSync:
    """`with model.no_sync():` backward passes inside are exchanged with the next one that follows outside of it.

    A copy of the model, or a saved one, has a no_sync that does nothing.
    """

    def __init__(self, passes: BackwardPasses | None = None) -> None:
        self._passes = passes  # which live as long as the model

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._passes is None else self._passes.quiet()

    def __deepcopy__(self, _: Any) -> NoSync:
        return NoSync()

    def __reduce__(self) -> tuple[type[NoSync], tuple[()]]:
        return NoSync, ()


class _Rate:
    """The learning rate of an optimizer as it is now; where its groups differ, the first one's."""

    def __init__(self, optimizer: weakref.ref[Optimizer]) -> None:
        self._optimizer = optimizer

    def __call__(self) -> float:
        optimizer = self._optimizer()
        return float(optimizer.param_groups[0].get("lr", 1.0)) if optimizer is not None else 1.0


def _met(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], exchange: Exchanges, whole: LoopGroup,
    hand: PassInputs,
    manner: PassSettings
) -> list[BackwardPasses]:  # fmt: skip
    """The passes of every model, all ranks having started from rank 0's values."""
    passes: list[BackwardPasses] = []
    for index, model in enumerate(models):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        channel = whole.meet(f"model {index}", "nccl" if device.type == "cuda" else "gloo")
        if index == 0:
            start_alike(tensors_of(models, optimizers), channel)
        pump, words = CommThread(channel), whole.meet(f"words {index}", "gloo")
        one = BackwardPasses(_trained(index, models, optimizers), exchange, whole, pump, words, hand, manner)
        hand.look(model)
        passes.append(one)
        weakref.finalize(one, _close, pump, words, whole, index)
    if not any(one.params for one in passes):
        raise BadInput("wanted a model with parameters that are trained, got none: unfreeze some of them", key="model")
    return passes


def _trained(index: int, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> TrainedParameters:
    """What the model at `index` trains: nothing twice, and with the first what belongs to no model."""
    before = {id(p) for model in models[:index] for p in model.parameters()}
    later = {id(p) for model in models[index + 1 :] for p in model.parameters()}
    own = {id(p) for p in models[index].parameters()}
    moved = [one for one in optimizers if index == 0 or any(id(p) in own - before for p in _params(one))]
    return TrainedParameters(models[index], moved if index == 0 else [], frozenset(before | (later - own)))


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _mind_batch_norm(
    models: Sequence[nn.Module], passes: Sequence[BackwardPasses], whole: LoopGroup, batch_norm: str
) -> None:
    """Statistics over all ranks' rows, or a word that they are of each rank's own."""
    for index, (model, one) in enumerate(zip(models, passes, strict=True)):
        if not (layers := with_statistics(model)):
            continue
        if batch_norm == "all":
            over_all_ranks(layers, one, whole.meet(f"statistics {index}", "gloo"))
        elif whole.rank == 0:
            _log.warning(
                "%s normalises by the statistics of each rank's own rows, which is not what one process with the whole "
                "batch does, and its buffers are each rank's own: pass batch_norm='all' for statistics over all ranks",
                layers[0][0],
            )


def _divider(
    loader: Iterable[Any] | None,
    models: Sequence[nn.Module],
    whole: LoopGroup,
    parts: tuple[float, ...],
    rows: BatchDims,
) -> Divider | None:
    if loader is None:
        return None
    return Divider(
        rank=whole.rank,
        parts=parts,
        rows=rows,
        given_rows=rows_of(loader),
        may_be_time_major=is_time_major(models),
    )


def _moves(optimizer: Optimizer, passes: BackwardPasses) -> bool:
    return any(passes.trained.holds(param) for param in _params(optimizer))


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _check(*, clip: float, accumulate: int, loss: str, weight: Any, batch_norm: str) -> None:
    """The arguments by themselves."""
    if not isinstance(clip, (int, float)) or isinstance(clip, bool) or not clip >= 0:
        raise bad_input(wanted="a norm of 0 or more", got=repr(clip), do="0 is for none", key="clip")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise bad_input(
            wanted="1 backward pass or more", got=repr(accumulate), do="1 exchanges every one", key="accumulate"
        )
    if loss not in ("read", "mean", "sum"):
        raise bad_input(wanted="read, mean or sum", got=repr(loss), do="correct it", key="loss")
    if loss != "mean" and loss != "read" and weight is not None:
        raise bad_input(wanted="weight with a loss that is a mean", got="loss='sum'", do="leave one away", key="weight")
    if weight is not None and not callable(weight):
        raise bad_input(
            wanted="a function of a batch", got=repr(weight), do="pass weight=lambda batch: ...", key="weight"
        )
    if batch_norm not in ("rank", "all"):
        raise bad_input(wanted="rank or all", got=repr(batch_norm), do="correct it", key="batch_norm")


def _close(pump: CommThread, words: Channel, whole: LoopGroup, index: int) -> None:
    """The end of a loop, or of its process."""
    whole.says("left", "has left its loop") if index == 0 else None
    pump.close()
    pump.channel.close()
    words.close()
