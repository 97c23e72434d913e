"""FromClass: an optimizer class written for torch, by its import path; its states are in the run's checkpoints.

Equations: those of the class, with its rate times lr_scale.
State:   what the class keeps for a parameter, of the parameter's shape or one number, and `begun`: whether the class
has made it yet.
Good when: a published optimizer is there as a class.   Not for: classes that need a closure (L-BFGS), that keep states
of other shapes (Adafactor) or in their groups (Prodigy, schedule-free ones), or that look at several parameters at
once. These are refused: a trial on small tensors finds them before the first step. It also finds whether rows of a
parameter move as they would alone, without which states are sharded by whole parameters only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gossamer.optimizer import Optimizer, OptimizerState
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.user_function import check_arguments, complaint, function_named
from gossamer.spec.validate import positive

_BEGUN = "begun"
_TRIAL_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class FromClass(Optimizer):
    """The optimizer class "package.module:Class" (`path`), made with `lr` and the other `arguments` of its own."""

    path: str = "torch.optim:NAdam"
    lr: float = 1e-3
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        found = self._class
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            do = "name a class such as torch.optim:NAdam"
            raise bad_input(wanted="a subclass of torch.optim.Optimizer", got=self.path, do=do, key="path")
        given = {"params": [], "lr": self.lr, **self.arguments}
        check_arguments(found, self.path, given, key="arguments")
        self._try()

    @property
    def slots(self) -> tuple[str, ...]:
        return (*dict.fromkeys(slot for shape in ((), (3,), (4, 3)) for slot in self._slots_of(shape)), _BEGUN)

    @property
    def made_by(self) -> str:
        return f"from_class({self.path})"

    @cached_property
    def by_element(self) -> bool:
        whole, rows = _drawn((4, 3), 1), _drawn((4, 3), 1)
        self._trial([whole], seed=2)
        for part in (slice(0, 2), slice(2, 4)):
            self._trial([rows[part]], seed=2, rows=part)
        return torch.equal(whole, rows)

    @cached_property
    def draws_to_zero(self) -> bool:
        param = _drawn((4, 3), 1)
        made, before = self._made([param]), param.clone()
        param.grad = torch.zeros_like(param)
        made.step()
        named = any(group.get("weight_decay") for group in made.param_groups)  # one that waits for gradients
        return named or not torch.equal(param, before)

    @property
    def remark(self) -> str:
        return f"{self.path}: that ranks and restarts change nothing was tried on small tensors, and is not known"

    def init(self, params: Mapping[str, Tensor]) -> OptimizerState:
        found: OptimizerState = {}
        for name, param in params.items():
            shapes = self._slots_of((2,) * param.ndim)
            found[name] = {
                slot: torch.zeros_like(param, memory_format=torch.contiguous_format).detach()
                if is_whole
                else torch.zeros((), device=param.device)
                for slot, is_whole in shapes.items()
            }
            found[name][_BEGUN] = torch.zeros((), device=param.device)
        return found

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        *,
        lr_scale: float,
        step: int,
    ) -> None:
        held = {name: params[name].detach() for name in grads if params[name].numel()}
        if not held:
            return
        made = self._made(list(held.values()))
        for group in made.param_groups:
            group["lr"] = self.lr * lr_scale
        for name, param in held.items():
            param.grad = _in_order(grads[name].detach(), param, param.dtype)  # a class may write to it
            if float(state[name][_BEGUN]):
                made.state[param] = {slot: _beside(one, param) for slot, one in state[name].items() if slot != _BEGUN}
        made.step()
        for name, param in held.items():
            param.grad = None
            for slot, value in made.state[param].items():
                if isinstance(value, Tensor) and value is not state[name][slot]:
                    state[name][slot].copy_(value)
            state[name][_BEGUN].fill_(1.0)

    @cached_property
    def _class(self) -> Any:
        return function_named(self.path, key="path")

    @cached_property
    def _known(self) -> dict[int, dict[str, bool]]:
        return {}

    def _made(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = self._class(list(params), lr=self.lr, **copy.deepcopy(self.arguments))
        except Exception as error:  # whatever the class raises
            raise complaint(f"to make {self.path}", error, key="arguments") from error
        return made

    def _slots_of(self, shape: tuple[int, ...]) -> dict[str, bool]:
        """Return the states that the class keeps for a parameter of so many dimensions: name -> whether of its shape.

        Raises BadInput for one that is neither of the parameter's shape nor a number.
        """
        if len(shape) not in self._known:
            param = _drawn(shape, 1)
            made = self._trial([param], seed=2)
            found: dict[str, bool] = {}
            for slot, value in made.state[param].items():
                if value is None:
                    continue
                if not isinstance(value, Tensor) or value.shape not in (param.shape, torch.Size(())):
                    kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise self._refused(f"{slot} of a parameter {shape} as {kind}", "a tensor of its shape, or 0-dim")
                found[str(slot)] = value.dim() > 0 or not shape
            self._known[len(shape)] = found
        return self._known[len(shape)]

    def _try(self) -> None:
        """Raise BadInput for a class that a rank could not run on its own parameters and take up again."""
        first, second = _drawn((4, 3), 1), _drawn((5,), 3)
        alone = [first.clone(), second.clone()]
        made = self._made([first.clone()])
        before = [{key: value for key, value in group.items() if key != "params"} for group in made.param_groups]
        self._trial([first, second], seed=2)
        for number, one in enumerate(alone):
            self._trial([one], seed=2 + number)
        if not all(torch.equal(a, b) for a, b in zip((first, second), alone, strict=True)):
            raise self._refused("an update that depends on the other parameters", "each parameter updated by itself")
        fresh, made = self._made([_drawn((4, 3), 1)]), self._trial([_drawn((4, 3), 1)], seed=2)
        counted = [key for key, value in _own(made).items() if _differs(value, _own(fresh).get(key))]
        if counted:
            raise self._refused(f"{', '.join(counted)} in the optimizer itself", "all states kept by parameter")
        for group, was in zip(made.param_groups, before, strict=True):
            changed = [key for key, value in group.items() if key != "params" and _differs(value, was.get(key))]
            if changed or "lr" not in group:
                named = ", ".join(changed) or "no rate called lr"
                raise self._refused(
                    f"{named} in its parameter groups", "all states kept by parameter, and a group's lr"
                )
        for shape in ((), (3,), (4, 3)):
            self._slots_of(shape)

    def _trial(self, params: Sequence[Tensor], *, seed: int, rows: slice = slice(None)) -> torch.optim.Optimizer:
        """Take some steps in place, parameter i by gradients drawn with `seed` + i (their `rows`).

        Return the optimizer. Raises BadInput where the class fails.
        """
        made = self._made(params)
        for step in range(_TRIAL_STEPS):
            for number, param in enumerate(params):
                shape = (4, *param.shape[1:]) if rows != slice(None) else tuple(param.shape)
                grad = _drawn(shape, 100 * step + seed + number)
                param.grad = grad[rows] if rows != slice(None) else grad
            try:
                made.step()
            except Exception as error:  # whatever the class raises
                raise complaint(f"{self.path} to take a step", error, key="path") from error
        return made

    def _refused(self, got: str, wanted: str) -> BadInput:
        return bad_input(
            wanted=f"{wanted}, as ranks hold parts of a model and checkpoints hold states by parameter",
            got=f"{self.path} with {got}",
            do="choose another class, or train with a loop of your own (gossamer.wrap)",
            key="path",
        )


def _beside(kept: Tensor, param: Tensor) -> Tensor:
    """Return what is kept for a parameter as a class expects it: numbers on the CPU, others in its order."""
    if not kept.dim():
        return kept if not param.dim() else kept.cpu()
    return kept if kept.stride() == param.stride() else _in_order(kept, param, kept.dtype)


def _in_order(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy whose elements lie in the order of the parameter's, as kernels of fused optimizers walk through the
    memory of all of them side by side.
    """
    return torch.empty_like(param, dtype=dtype).copy_(tensor)


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _own(made: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers among the attributes that a class has given itself."""
    plain = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    return {key: one for key, one in vars(made).items() if key not in plain and isinstance(one, int | float | Tensor)}


def _differs(value: Any, was: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(was, Tensor):
        return not torch.equal(value, was)
    return bool(value != was)
