"""Checks and broadcast at the start of a wrapped loop: all ranks begin with the parameters and states of rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm.channel import Channel
from gossamer.comm.message import Collective, Message
from gossamer.spec.errors import BadInput, bad_input

_PIECE_BYTES = 64 << 20


def check_models(models: Sequence[Any]) -> None:
    """Raise BadInput if a model cannot be trained by wrap."""
    for one in models:
        if not isinstance(one, nn.Module):
            raise bad_input(
                wanted="a torch.nn.Module", got=_described(one), do="pass the model that is trained", key="model"
            )
        if isinstance(one, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise bad_input(
                wanted="a model without a wrapper",
                got=f"one in {type(one).__name__}, which averages gradients as well",
                do="pass the model inside that wrapper (its attribute .module)", key="model",
            )  # fmt: skip
        for name, param in one.named_parameters():
            if param.is_complex():
                raise bad_input(
                    wanted="parameters of a real dtype", got=f"parameter {name} of {param.dtype}",
                    do="store its real and imaginary parts as real parameters (torch.view_as_real)", key="model",
                )  # fmt: skip
            if nn.parameter.is_lazy(param):
                raise bad_input(
                    wanted="parameters with a shape",
                    got=f"lazy parameter {name}, which gets its shape from the first batch",
                    do="run the model on one batch before you call gossamer.wrap", key="model",
                )  # fmt: skip


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise BadInput if an object is not an optimizer, or needs gradients that a mean over ranks cannot be."""
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise bad_input(
                wanted="a torch.optim.Optimizer made of the model's parameters", got=_described(one),
                do="create the optimizer from model.parameters() first, and pass it", key="optimizer",
            )  # fmt: skip
        if not hasattr(one, "_optimizer_step_pre_hooks"):
            raise bad_input(
                wanted="an optimizer whose constructor calls that of torch.optim.Optimizer",
                got=f"{type(one).__name__}, which does not, so that its steps cannot be hooked",
                do=f"pass the optimizer inside {type(one).__name__} to gossamer.wrap, and build {type(one).__name__} "
                "around the optimizer that gossamer.wrap returns",
                key="optimizer",
            )
        if isinstance(one, torch.optim.SparseAdam):
            raise bad_input(
                wanted="an optimizer that takes dense gradients, as the mean over ranks is dense",
                got="SparseAdam",
                do="use Adam; or SGD or Adagrad, which do not change rows without a gradient",
                key="optimizer",
            )


def _described(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__}: {value!r:.60}"


def tensors_of(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return by name all tensors that training starts from: parameters, frozen ones and those that only an optimizer
    has, buffers, and optimizer states.
    """
    found: dict[str, Tensor] = {}
    for index, model in enumerate(models):
        found |= {f"model {index} {name}": p.detach() for name, p in model.named_parameters()}
        found |= {f"model {index} {name}": b.detach() for name, b in model.named_buffers()}
    for index, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        found |= {f"optimizer {index} parameter {n}": p.detach() for n, p in enumerate(params)}
        for number, param in enumerate(params):
            for name, tensor in _tensors(optimizer.state.get(param, {})):
                found[f"optimizer {index} {name} of parameter {number}"] = tensor.detach()
    return found


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield str(name), value


def start_alike(tensors: Mapping[str, Tensor], channel: Channel) -> None:
    """Broadcast rank 0's values to all ranks, bit for bit. Raises BadInput if ranks have other tensors."""
    said = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors.items()]
    mine = torch.tensor([float(zlib.crc32(repr(said).encode())), float(len(said))], dtype=torch.float64)
    (table,) = channel.start(Message((mine,), Collective.GATHER)).wait()
    if len({tuple(row) for row in table.tolist()}) > 1:
        raise BadInput(
            f"the model or the optimizer differs between ranks: {[int(n) for n in table[:, 1].tolist()]} tensors by "
            "rank, or different names, shapes, dtypes or requires_grad. Build model and optimizer in the same way on "
            "all ranks, and load a checkpoint on all ranks or on none"
        )
    distinct = list({(t.data_ptr(), t.shape, t.dtype): t for t in tensors.values() if t.numel()}.values())
    for tensors_of_one in _pieces(distinct):
        _send(tensors_of_one, channel)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield groups of tensors, so that a message is neither tiny nor as large as the model."""
    piece: list[Tensor] = []
    for tensor in tensors:
        piece.append(tensor)
        if sum(t.numel() * t.element_size() for t in piece) >= _PIECE_BYTES:
            yield piece
            piece = []
    if piece:
        yield piece


def _send(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Copy rank 0's bytes to all ranks, as the maximum over ranks of its bytes and zeros."""
    raw = torch.cat([tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    if channel.rank != 0:
        raw.zero_()
    (found,) = channel.start(Message((raw,), Collective.MAX)).wait()
    borders = [tensor.numel() * tensor.element_size() for tensor in tensors]
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(found, borders), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
