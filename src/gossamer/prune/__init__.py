"""Prunings: which weights of a trained model are set to zero. One method per file.

A pruning gives every weight of the model's linear layers a score, from the weight and from what reached its layer on a
calibration text, and the lowest ones of each output row go. `prune` returns masks (True: kept); it changes no weight.
To add one:

- Write `prune/NAME.py`: one final frozen dataclass, a subclass of `Pruning`, whose fields are its settings. It is found
  by its file name; `gossamer prune SOURCE --by NAME` and `prune: {NAME: {sparsity: 0.5}}` build it.
- `scores` is a pure function of one matrix and its statistics, which `prune/_observed.py` collects.
- Tests: `tests/prune/test_NAME.py`; `tests/prune/test_prunings.py` checks every pruning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gossamer.model.unit_walk import Forward, run_to, unit_layers
from gossamer.prune._expert_distance import (
    ExpertCall,
    ModuleExperts,
    TeacherExperts,
    distances_from,
    expert_distances,
    mean_square,
    other_experts,
    parameter_shapes,
)
from gossamer.prune._kept import Kept
from gossamer.prune._matrices import Found, Matrix, find
from gossamer.prune._observed import InputStatistics, observing, weighed
from gossamer.spec.errors import bad_input
from gossamer.spec.registry import Registry

__all__ = [
    "ExpertCall",
    "InputStatistics",
    "Kept",
    "Matrix",
    "ModuleExperts",
    "Pruned",
    "PrunedMatrix",
    "Pruning",
    "REGISTRY",
    "TeacherExperts",
    "apply_masks",
    "build",
    "check_prunable",
    "distances_from",
    "expert_distances",
    "mean_square",
    "names",
    "other_experts",
    "parameter_shapes",
    "prune",
    "weighed",
]

KEY = "prune"

Progress = Callable[[int, int], None]  # matrices done, matrices in all


class Pruning(ABC):
    """A pruning: a frozen dataclass of settings.

    `sparsity`: the fraction of each output row that is set to zero, rounded down to whole weights. `pattern`: "n:m", in
    its place: n of every m neighbors in a row are kept. Neither: a sparsity of 0.5. `include` and `exclude`: regular
    expressions of layers' paths; by default all linear layers and experts in the repeated blocks, but not their
    routers. `needs_text`: its scores need what reaches each layer; `weighs_by_gate`: what reaches an expert counts by
    the router's weight.
    """

    sparsity: float | None
    pattern: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    needs_text: ClassVar[bool] = False
    weighs_by_gate: ClassVar[bool] = False

    @abstractmethod
    def scores(self, weight: Tensor, seen: InputStatistics | None) -> Tensor:
        """Return the score of each weight of (out, in), in float64; the lowest ones of a row are pruned.

        seen: what reached the layer; None where nothing did, or where no text is needed: then the scores are
        magnitudes.
        """


REGISTRY: Registry[Pruning] = Registry(__name__, Pruning)  # type: ignore[type-abstract]
names, build = REGISTRY.names, REGISTRY.build


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedMatrix:
    """What became of one matrix. `kept`: weights that stay, of `weights`; `tokens`: that reached it on the calibration
    text; `fell_back`: none did, so magnitudes decided.
    """

    name: str
    parameter: str
    weights: int
    kept: int
    tokens: int
    fell_back: bool

    @property
    def sparsity(self) -> float:
        """Return the fraction of the weights that is set to zero."""
        return 1 - self.kept / self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The masks of a pruning, by canonical name of the parameter (True: kept), and what was left out, with why."""

    masks: Mapping[str, Tensor]
    matrices: tuple[PrunedMatrix, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def sparsity(self) -> float:
        """Return the fraction of the masked parameters' weights that is set to zero."""
        return 1 - sum(one.kept for one in self.matrices) / sum(one.weights for one in self.matrices)


@torch.no_grad()
def prune(
    module: nn.Module,
    pruning: Pruning,
    forwards: Sequence[Forward] = (),
    progress: Progress = lambda done, total: None,
) -> Pruned:
    """Return the masks of `pruning` for `module`, which stays as it is in the end.

    forwards: each runs the module on a batch of the calibration text, always the same; the caller has put it into
    evaluation mode. What reaches a repeated block of the model is what the pruned ones before it give.
    While it runs, the weights that are pruned are held twice. Raises BadInput for a model without linear layers, for
    rows that the pattern does not divide, for layers that cannot be observed, and where a text is needed and there is
    none.
    """
    kept = Kept.of(pruning.sparsity, pruning.pattern)
    found = find(module, pruning.include, pruning.exclude)
    _check(module, pruning, found, kept, forwards)
    params = dict(module.named_parameters())
    masks: dict[str, Tensor] = {}
    gone: dict[str, Tensor] = {}
    told: dict[str, PrunedMatrix] = {}
    used = forwards if pruning.needs_text else ()
    try:
        for layers in unit_layers(module, found.layers, used, found.units(module)):
            unit = found.within(layers.names)
            with observing(unit, weighs_by_gate=pruning.weighs_by_gate) as seen:
                run_to(module, layers, used)
            made = {one.name: _mask(one, pruning, kept, seen[one.name]) for one in unit.matrices}
            told |= {one.name: _told(one, pruning, made[one.name], seen[one.name].tokens) for one in unit.matrices}
            for name, mask in _as_held(unit, made, params).items():
                masks[name], gone[name] = mask, params[name].masked_select(~mask)
                params[name].masked_fill_(~mask, 0.0)
            progress(len(told), len(found.matrices))
    finally:
        for name, values in gone.items():
            params[name].masked_scatter_(~masks[name], values)
    return Pruned(
        masks={one.parameter: masks[one.parameter] for one in found.matrices},
        matrices=tuple(told[one.name] for one in found.matrices),
        left_out=found.left_out,
    )


def check_prunable(module: nn.Module, pruning: Pruning) -> None:
    """Raise BadInput for a model that `prune` refuses whatever its weights and the text are."""
    found = find(module, pruning.include, pruning.exclude)
    _check(module, pruning, found, Kept.of(pruning.sparsity, pruning.pattern), [lambda: None])


def _check(module: nn.Module, pruning: Pruning, found: Found, kept: Kept, forwards: Sequence[Forward]) -> None:
    for matrix in found.matrices:
        kept.check(matrix.weight.shape[1], matrix.name)
    if pruning.weighs_by_gate and not (found.fused or found.listed):
        raise bad_input(
            wanted="a mixture of experts, whose router weighs its tokens",
            got=f"a {type(module).__name__} without experts",
            do="choose wanda, which is the same for a model without experts",
            key=KEY,
        )
    if pruning.needs_text and not forwards:
        raise bad_input(
            wanted="a text, for what reaches each layer",
            got="none",
            do="name text files (--data), or prune by magnitude",
            key=KEY,
        )


def _mask(matrix: Matrix, pruning: Pruning, kept: Kept, seen: InputStatistics) -> Tensor:
    """Return which weights of a matrix (out, in) stay."""
    used = seen if seen.tokens else None
    return kept.mask(_checked(pruning.scores(matrix.weight, used), matrix.name))


def _told(matrix: Matrix, pruning: Pruning, mask: Tensor, tokens: int) -> PrunedMatrix:
    return PrunedMatrix(
        name=matrix.name,
        parameter=matrix.parameter,
        weights=mask.numel(),
        kept=int(mask.sum()),
        tokens=tokens,
        fell_back=pruning.needs_text and not tokens,
    )


def _as_held(unit: Found, made: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the masks of matrices by parameter, in its layout."""
    parts: dict[str, list[Tensor]] = {}
    for one in unit.matrices:
        parts.setdefault(one.parameter, []).append(one.as_held(made[one.name]))
    return {name: torch.stack(some).view(params[name].shape) for name, some in parts.items()}


def _checked(scores: Tensor, name: str) -> Tensor:
    if not bool(scores.isfinite().all()):
        raise bad_input(
            wanted="finite weights and inputs",
            got=f"others in {name}",
            do="prune an earlier checkpoint, or another one",
            key=KEY,
        )
    return scores


@torch.no_grad()
def apply_masks(module: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the weights to +0 that the masks do not keep, in place. Raises BadInput for masks of another model."""
    params = dict(module.named_parameters())
    for name, mask in masks.items():
        if name not in params or params[name].shape != mask.shape:
            got = f"{name}, which this {type(module).__name__} does not have"
            if name in params:
                got = f"{name} of shape {tuple(mask.shape)}, where it has {tuple(params[name].shape)}"
            raise bad_input(
                wanted="masks of this model",
                got=got,
                do="prune this model, or give the one that the masks are of",
                key=KEY,
            )
    for name, mask in masks.items():
        params[name].masked_fill_(~mask.to(params[name].device), 0.0)
