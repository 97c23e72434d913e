"""Optimizer classes as people write them, each with one habit."""

from __future__ import annotations

from typing import Any

import torch


class _Plain(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rounds": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad / self.length(group, param), alpha=-group["lr"])
            self.after(group)

    def length(self, group: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
        assert param.grad is not None
        return param.grad.norm()

    def after(self, group: dict[str, Any]) -> None:
        pass


class OfNorm(_Plain):
    """Divides by the norm of a parameter's gradient."""


class OfAll(_Plain):
    """Divides by the norm of all gradients."""

    def length(self, group: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
        return torch.stack([one.grad.norm() for one in group["params"]]).norm()


class InGroup(_Plain):
    """Counts its steps where no state is."""

    def after(self, group: dict[str, Any]) -> None:
        group["rounds"] += 1


class InItself(_Plain):
    """Counts its steps in an attribute."""

    rounds = 0

    def after(self, group: dict[str, Any]) -> None:
        self.rounds += 1
