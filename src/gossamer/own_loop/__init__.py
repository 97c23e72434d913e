"""`gossamer.wrap`: data-parallel training of the user's own loop on several processes, with one new line.

    model, optimizer, loader = gossamer.wrap(model, optimizer, loader)      # the only new line
    for batch in loader:                                                    # this rank's rows of every batch
        loss = model(**batch).loss
        loss.backward()                                                     # .grad is the mean of all ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)             # so everything that follows is as in one
        optimizer.step()                                                    # a transaction of all ranks
        optimizer.zero_grad()

Every rank runs the same script (torchrun, srun, mpirun, `gossamer lab run`, or variables set by hand); a script that
runs alone has one rank. The gradients are those of one process with the global batch. Where they cannot be, an error
says why before any parameter has moved. The loss's denominator is read from its autograd graph (package `loss_reader`);
each module here holds one other part of that contract.

    backward_passes     average `.grad` over ranks           status_rows       control messages, and their checks
    gradient_hooks      hooks of autograd on parameters      pass_status       those of the backward passes
    gradient_buckets    the memory of the gradients          bucket_exchange   send them, and take their means
    user_gradients      what was in `.grad` before           backward_pass     a pass in progress
    losses              hook of torch.autograd.backward      pass_inputs       which batch a backward pass is of
    batches             a rank's rows of any batch           rank_loader       the same batches on all ranks
    batch_structure     the leaves of a batch by path        batch_fingerprint   a hash of a batch
    own_rows            load no more than a rank needs       optimizer_step    the optimizer step as a transaction
    process_group       rendezvous, and lost peers           startup           broadcast rank 0's initial values
    blocking_exchange   exchanges without a thread           trained_parameters   parameters that require a gradient
    exchange_choice     exchange="auto"                      batch_norm        statistics over all ranks
    loss_denominator    the number a loss is a mean over     learning_rates    those that error feedback follows
    compute_clock       the time of a rank's own work        untrained_tensors   buffers, and frozen parameters
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.comm.channel import Channel
from gossamer.comm.comm_thread import CommThread
from gossamer.own_loop.backward_pass import PassSettings
from gossamer.own_loop.backward_passes import AUTO, BackwardPasses
from gossamer.own_loop.batch_norm import over_all_ranks, with_statistics
from gossamer.own_loop.batches import BatchDims, Divider, is_time_major
from gossamer.own_loop.gradient_hooks import close_earlier
from gossamer.own_loop.learning_rates import LearningRates
from gossamer.own_loop.loss_denominator import READ, denominator_of
from gossamer.own_loop.optimizer_step import OptimizerSteps
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup, parts_of, party
from gossamer.own_loop.rank_loader import RankDataLoader, refuse_sampler, rows_of
from gossamer.own_loop.startup import check_models, check_optimizers, start_alike, tensors_of
from gossamer.own_loop.trained_parameters import TrainedParameters
from gossamer.own_loop.untrained_tensors import UntrainedTensors
from gossamer.recipe import check_loop
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.method_config import Exchanges

_LEAVE_S = 3.0  # for the store to take the last word of this rank
_log = logging.getLogger(__name__)


def wrap(
    model: Any,
    optimizer: Any,
    loader: Iterable[Any] | None = None,
    *,
    exchange: Exchanges = "dense",
    lossy: bool = False,
    batch_fractions: list[float] | None = None,
    max_grad_norm: float = 0.0,
    accumulate: int = 1,
    weight: Callable[[Any], float] | None = None,
    loss: str = READ,
    rows: BatchDims = None,
    split: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    batch_norm: str = "rank",
    seed: int = 0,
    timeout_s: float = 120.0,
) -> tuple[Any, Any, Any]:
    """Wrap a training loop: return model and optimizer with gradients averaged over ranks, and this rank's loader.

    Several models and optimizers may come as lists, and come back so. Raises BadInput, PeerLost; so do backward and
    step, before any parameter has moved. A step with a closure raises StepRejected if a gradient is not finite when the
    optimizer has begun to move parameters.

    exchange: a method of the category `exchange`, or "auto", which chooses after the first steps by the links between
    hosts; with `lossy` it may choose a lossy one. batch_fractions: part of every batch per rank (default equal).
    max_grad_norm: largest norm of an optimizer's gradients, 0 for none. accumulate: backward passes before each step,
    averaged in one exchange (`model.no_sync()` does the same by hand). weight: a function of a batch that returns the
    number of labels or rows in the loss's mean. loss: "read" from its autograd graph, else "mean" (over `weight`'s
    number, or rows) or "sum". rows: the dimension of each tensor that has rows, where it cannot be found. split: False
    if every rank's loader yields its own data. scaler: the GradScaler of the loop, for exchanges that keep residuals.
    batch_norm: "rank" or "all", the rows that BatchNorm's statistics are taken over. seed: of exchanges that draw
    random numbers. timeout_s: seconds to wait for other ranks.
    """
    models, optimizers = _several(model), [one for one in _several(optimizer) if one is not None]
    _check(models, optimizers, max_grad_norm=max_grad_norm, accumulate=accumulate, batch_norm=batch_norm)
    scale = scaler.get_scale if scaler else None
    manner = PassSettings(accumulate=accumulate, loss=denominator_of(loss, weight), seed=seed, lossy=lossy, scale=scale)
    if loader is not None and split:
        refuse_sampler(loader)
    whole = party(timeout_s)
    parts = parts_of(batch_fractions, whole.ranks)
    names = [tuple(_trained(index, models, optimizers).new({})) for index in range(len(models))]
    check_loop(exchange=exchange, max_grad_norm=max_grad_norm, lossy=lossy, names=names)
    if exchange == AUTO and whole.is_on_one_host:
        exchange = "dense"  # every process is on this machine
    hand = PassInputs(divides=split)
    passes = [] if whole.is_alone else _met(models, optimizers, exchange, whole, hand, manner)
    _mind_batch_norm(models, passes, whole, batch_norm)
    _hook_steps(models, optimizers, passes, hand, max_grad_norm)
    divider = _divider(loader, models, whole, parts, rows) if split and loader is not None else None
    wrapped = None if loader is None else RankDataLoader(loader, hand, whole, divider, looks_ahead=accumulate > 1)
    return model, optimizer, wrapped


def _hook_steps(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    passes: Sequence[BackwardPasses],
    hand: PassInputs,
    max_grad_norm: float,
) -> None:
    """Make the optimizers' steps transactions of all ranks, and give every model its `no_sync`."""
    untrained = UntrainedTensors(models)
    for one in optimizers:
        mine = [p for p in passes if _moves(one, p)]
        OptimizerSteps(one, mine, max_grad_norm, untrained)
        hand.know(one)
    rates = LearningRates(tuple(weakref.ref(one) for one in optimizers))
    for each in passes:
        each.follow_rates(rates)
    for index, model in enumerate(models):
        object.__setattr__(model, "no_sync", NoSync(passes[index] if passes else None))
        if passes:
            passes[index].at_close(partial(_forget, weakref.ref(model)))


def _forget(model: weakref.ref[nn.Module]) -> None:
    """Let a model keep its gradient averaging alive no longer."""
    if (found := model()) is not None:
        object.__setattr__(found, "no_sync", NoSync())


class NoSync:
    """The context manager `model.no_sync()`: backward passes inside accumulate, and the next one outside sends their
    sum.

    A copy of the model, or a saved one, has a no_sync without effect.
    """

    def __init__(self, passes: BackwardPasses | None = None) -> None:
        self._passes = passes  # kept alive by the model

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._passes is None else self._passes.quiet()

    def __deepcopy__(self, _: Any) -> NoSync:
        return NoSync()

    def __reduce__(self) -> tuple[type[NoSync], tuple[()]]:
        return NoSync, ()


def _met(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    exchange: Exchanges,
    whole: LoopGroup,
    hand: PassInputs,
    manner: PassSettings,
) -> list[BackwardPasses]:
    """Start all ranks from rank 0's values and return the gradient averaging of every model."""
    passes: list[BackwardPasses] = []
    for index, model in enumerate(models):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        channel = whole.meet(f"model {index}", "nccl" if device.type == "cuda" else "gloo")
        if index == 0:
            start_alike(tensors_of(models, optimizers), channel)
            close_earlier(_every(models, optimizers))
        pump, words = CommThread(channel), whole.meet(f"words {index}", "gloo")
        one = BackwardPasses(_trained(index, models, optimizers), exchange, whole, pump, words, hand, manner)
        one.at_close(hand.look(model))
        passes.append(one)
        weakref.finalize(one, _close, pump, words, whole, index)
    if not any(one.params for one in passes):
        said = "wanted a model with trainable parameters, got none: set requires_grad=True on some of them"
        raise BadInput(said, key="model")
    return passes


def _trained(index: int, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> TrainedParameters:
    """Return the parameters that the model at `index` trains; each belongs to one model, loose ones to the first."""
    before = {id(p) for model in models[:index] for p in model.parameters()}
    later = {id(p) for model in models[index + 1 :] for p in model.parameters()}
    own = {id(p) for p in models[index].parameters()}
    others = frozenset(before | (later - own))
    return TrainedParameters(models[index], optimizers, others, has_loose=index == 0)


def _every(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """Return all parameters of the models and the optimizers, trained or frozen."""
    return [p for model in models for p in model.parameters()] + [p for one in optimizers for p in _params(one)]


def _params(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _mind_batch_norm(
    models: Sequence[nn.Module], passes: Sequence[BackwardPasses], whole: LoopGroup, batch_norm: str
) -> None:
    """Make BatchNorm's statistics global, or warn that each rank takes them over its own rows."""
    if not passes:
        return  # a process that is alone has all rows
    for index, (model, one) in enumerate(zip(models, passes, strict=True)):
        if not (layers := with_statistics(model)):
            continue
        if batch_norm == "all":
            over_all_ranks(layers, one, whole.meet(f"statistics {index}", "gloo"))
        elif whole.rank == 0:
            _log.warning(
                "BatchNorm layer %s takes statistics over each rank's own rows, unlike one process with the global "
                "batch, and its running averages differ between ranks: pass batch_norm='all' for statistics over the "
                "rows of all ranks",
                layers[0][0],
            )


def _divider(
    loader: Iterable[Any],
    models: Sequence[nn.Module],
    whole: LoopGroup,
    parts: tuple[float, ...],
    rows: BatchDims,
) -> Divider:
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


def _check(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    *,
    max_grad_norm: float,
    accumulate: int,
    batch_norm: str,
) -> None:
    """Check each argument by itself. Raises BadInput."""
    check_models(models)
    check_optimizers(optimizers)
    if not isinstance(max_grad_norm, (int, float)) or isinstance(max_grad_norm, bool) or not max_grad_norm >= 0:
        do = "pass the largest gradient norm, or 0 for no gradient clipping"
        raise bad_input(wanted="a number of 0 or more", got=repr(max_grad_norm), do=do, key="max_grad_norm")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        do = "pass the number of backward passes before each optimizer step, 1 for no accumulation"
        raise bad_input(wanted="an integer of 1 or more", got=repr(accumulate), do=do, key="accumulate")
    if batch_norm not in ("rank", "all"):
        do = "pass 'rank' for BatchNorm statistics over each rank's own rows, 'all' for those over all ranks' rows"
        raise bad_input(wanted="one of rank, all", got=repr(batch_norm), do=do, key="batch_norm")


def _close(pump: CommThread, words: Channel, whole: LoopGroup, index: int) -> None:
    """Close the communication of a loop at its end, or at the end of the process."""
    if index == 0:
        whole.store.hurry(_LEAVE_S)
        whole.says("left", "has ended its training loop")
    pump.close()
    pump.channel.close()
    words.close()
