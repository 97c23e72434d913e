"""The match of hidden states in a run: hooks on the blocks of unmodified models, and the learned maps between them.

The maps are parameters of the student under `hidden_match.` while the run trains: exchanges, sharded optimizer states
and checkpoints treat them as any weight. What reads a checkpoint as a model builds it without them, so no export,
sample or evaluation has them.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.loss import IGNORE
from gossamer.loss.hidden_match import HiddenMatch
from gossamer.loss.inputs.labels import targets
from gossamer.model.seeded import seeded
from gossamer.model.unit_seeds import mix
from gossamer.model.units import block_names
from gossamer.ops.transport import optimal_flow
from gossamer.spec.errors import bad_input

MASK = "attention_mask"
CHILD = "hidden_match"  # attribute of the student while it is trained
_KEY = "train.loss.hidden"


@dataclass(slots=True)
class BlockTaps:
    """The outputs of some blocks of a model in its newest forward. `whose`: for messages."""

    whose: str
    paths: tuple[str, ...]
    held: dict[str, list[Any]] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)

    @staticmethod
    def on(whose: str, module: nn.Module, paths: Sequence[str]) -> BlockTaps:
        """Put hooks on `module` and on its blocks at `paths`; `remove` takes them off."""
        taps = BlockTaps(whose, tuple(dict.fromkeys(paths)))
        taps.handles.append(module.register_forward_pre_hook(lambda *_: taps.held.clear()))
        for path in taps.paths:
            taps.handles.append(module.get_submodule(path).register_forward_hook(taps._hook(path)))
        return taps

    def _hook(self, path: str) -> Callable[..., None]:
        def hold(_: nn.Module, __: Any, output: Any) -> None:
            self.held.setdefault(path, []).append(output[0] if isinstance(output, tuple) else output)

        return hold

    def taken(self) -> dict[str, Tensor]:
        """Return the outputs by path, which are then held no longer.

        Raises BadInput where a block did not run once, or gave no tensor of floating-point numbers.
        """
        held = dict(self.held)
        self.held.clear()
        for path in self.paths:
            found = held.get(path, [])
            if len(found) != 1 or not isinstance(found[0], Tensor) or not found[0].is_floating_point():
                got = f"{len(found)} calls" if len(found) != 1 else f"a {type(found[0]).__name__}"
                raise bad_input(
                    wanted=f"blocks that run once in a forward {self.whose}, and return a hidden state",
                    got=f"{got} of {path}",
                    do="use the distillation of outputs alone",
                    key=_KEY,
                )
        return {path: held[path][0] for path in self.paths}

    def remove(self) -> None:
        """Take the hooks off, and hold nothing."""
        for one in self.handles:
            one.remove()
        self.held.clear()


class TeacherStates(ABC):
    """The states of a teacher's blocks at the tokens of the batch whose loss is due."""

    @abstractmethod
    def taken(self, batch: Mapping[str, Tensor], valid: Tensor) -> Mapping[str, Tensor]:
        """Return the rows (n, E) of each block at the labels whose numbers are `valid`; they are then held no longer.

        Raises BadInput for states of other tokens than the batch's.
        """


@dataclass(frozen=True, slots=True)
class TappedStates(TeacherStates):
    """The states of a teacher beside the student."""

    taps: BlockTaps

    def taken(self, batch: Mapping[str, Tensor], valid: Tensor) -> Mapping[str, Tensor]:
        found = self.taps.taken()
        return {path: label_rows(one, batch, f"{path} of the teacher")[valid] for path, one in found.items()}


class HiddenMaps(nn.Module):
    """The learned maps, a set for each pair of blocks or for several, `NAME_SET`, in the type of the student.

    They have no forward.
    """

    def __init__(self, shapes: Sequence[Mapping[str, tuple[int, ...]]], like: Tensor, seed: int) -> None:
        super().__init__()
        self.names = [tuple(one) for one in shapes]
        for pair, one in enumerate(shapes):
            for name, shape in one.items():
                drawn = torch.zeros(shape)
                if len(shape) > 1:
                    bound = shape[-1] ** -0.5
                    with seeded(mix(seed, zlib.crc32(f"{CHILD}.{name}_{pair}".encode()))):
                        drawn.uniform_(-bound, bound)
                self.register_parameter(f"{name}_{pair}", nn.Parameter(drawn.to(like.device, like.dtype)))

    def of(self, pair: int) -> dict[str, Tensor]:
        """Return a set of maps, in float32."""
        return {name: self.get_parameter(f"{name}_{pair}").float() for name in self.names[pair]}


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTerm:
    """The match of the hidden states of two models, whose forwards on a batch have just run.

    `pairs`: the paths of the blocks, of the student and of the teacher; `weight` multiplies the match.
    """

    by: HiddenMatch
    weight: float
    pairs: Sequence[tuple[str, str, int]]
    maps: HiddenMaps
    student: BlockTaps
    teacher: TeacherStates
    join: Callable[[Tensor], Tensor] = torch.mean

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted match, joined over pairs of blocks, a mean over tokens with a valid label, () float32.

        Random numbers are drawn where not all tokens are compared: under `ModelRuntime.loss` they depend on seed, step
        and micro-batch alone. Raises BadInput for hidden states of other tokens than the batch's.
        """
        ours, labels = self.student.taken(), targets(batch)
        valid = (labels != IGNORE).nonzero().squeeze(1)
        most, found = self.by.most_tokens, []
        with torch.autocast(labels.device.type, enabled=False):
            theirs = self.teacher.taken(batch, valid)
            if most and len(valid) > most:
                drawn = torch.randperm(len(valid), device=valid.device)[:most].sort().values
                valid, theirs = valid[drawn], {path: one[drawn] for path, one in theirs.items()}
            for own, other, which in self.pairs:
                x = label_rows(ours[own], batch, f"{own} of the student")[valid]
                y = theirs[other].detach()
                found.append(self.by.loss(x.float(), y.float(), self.maps.of(which)))
            return self.weight * self.join(torch.stack(found))


@dataclass(frozen=True, slots=True)
class EarthMovers:
    """The earth mover's distance between so many blocks of the student and any number of the teacher's."""

    student: int

    def __call__(self, costs: Tensor) -> Tensor:
        """Return the sum of the costs (pairs,) by the optimal flow, (); no gradient goes through the flow."""
        flow = optimal_flow(costs.detach().view(self.student, -1).tolist())
        return (costs * torch.tensor(flow).to(costs).flatten()).sum()


def label_rows(hidden: Tensor, batch: Mapping[str, Tensor], what: str) -> Tensor:
    """Return a row (., D) for each label of a batch, as `token_rows` does."""
    return token_rows(hidden, batch["labels"].shape, batch.get(MASK), what)


def token_rows(hidden: Tensor, labels: Sequence[int], mask: Tensor | None, what: str) -> Tensor:
    """Return a row (., D) for each label, of labels of this shape: of a token, or, where a row of the batch has one
    label, the mean over its tokens, without padding (`mask` 0). Raises BadInput for a hidden state of other shapes.
    """
    if len(labels) == 2 and hidden.ndim == 3 and hidden.shape[:2] == tuple(labels):
        return hidden.flatten(0, 1)
    if len(labels) == 1 and hidden.ndim in (2, 3) and len(hidden) == labels[0]:
        if hidden.ndim == 2:
            return hidden
        if mask is None:
            return hidden.mean(1)
        if mask.shape == hidden.shape[:2]:
            kept = mask.to(hidden.dtype)[:, :, None]
            return (hidden * kept).sum(1) / kept.sum(1).clamp(min=1)
    raise bad_input(
        wanted="hidden states (batch, sequence, width), of the tokens of the batch",
        got=f"{tuple(hidden.shape)} of {what}, with labels {tuple(labels)}",
        do="use the distillation of outputs alone",
        key=_KEY,
    )


def blocks_of(module: nn.Module, whose: str) -> tuple[str, ...]:
    """Return the paths of a model's repeated blocks, in order. Raises BadInput for none, and for several lists."""
    found = block_names(module)
    lists = {path.rpartition(".")[0] for path in found}
    if len(lists) != 1:
        raise bad_input(
            wanted=f"one list of repeated blocks in {whose} (nn.ModuleList)",
            got=f"{len(lists)} ({', '.join(sorted(lists))})" if lists else "none",
            do="use the distillation of outputs alone",
            key=_KEY,
        )
    return found


def attach(module: nn.Module, maps: HiddenMaps) -> Callable[[], None]:
    """Make the maps parameters of `module`; return what undoes it. Raises BadInput where the name is taken."""
    if hasattr(module, CHILD):
        raise bad_input(
            wanted="a student without learned maps of its own",
            got=f"one that has an attribute {CHILD}",
            do="rename that attribute: the maps of hidden states take this name while it is trained",
            key=_KEY,
        )
    module.add_module(CHILD, maps)

    def detach() -> None:
        module._modules.pop(CHILD, None)

    return detach
