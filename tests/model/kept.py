"""Modules whose Python remembers something: of several kinds, none of which knows that it will be cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.mix(x))


class Net(nn.Module):
    """An inlet, four blocks, an outlet, and what stands between the blocks."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def between(self, i: int, got: Any) -> Any:
        return got

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for i, block in enumerate(self.blocks):
            x = self.between(i, block(x))
        return self.outlet(x)


class CountsAtTheEnd(Net):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * (1 + 0.5 * self.count))
        self.count += 1
        return y


class FlagAround(Net):
    """A flag that is set before the blocks and put back behind them; a list that is emptied there."""

    is_late, log = False, None

    def forward(self, x: Tensor) -> Tensor:
        self.log = self.log or []
        x = x * (2.0 if self.is_late or self.log else 1.0)
        self.is_late = True
        self.log.append(1)
        y = super().forward(x)
        self.is_late = False
        self.log.clear()
        return y


class GradMode(Net):
    """Two blocks without gradients, by switches and not by a context."""

    def between(self, i: int, got: Any) -> Any:
        if i == 1:
            torch.set_grad_enabled(False)
        if i == 3:
            torch.set_grad_enabled(True)
        return got

    def forward(self, x: Tensor) -> Tensor:
        skip = self.inlet(x)
        return super().forward(x) + self.outlet(skip)


class DefaultType(Net):
    def between(self, i: int, got: Any) -> Any:
        if i == 0:
            torch.set_default_dtype(torch.float64)
        if i == 2:
            torch.set_default_dtype(torch.float32)
        return got

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros(WIDTH))


class HooksRemoved(Net):
    """Hooks that are taken off again behind the blocks, not in a `finally`."""

    def forward(self, x: Tensor) -> Tensor:
        handles = [b.register_forward_hook(lambda module, given, out: out * 0.9) for b in self.blocks]
        y = super().forward(x)
        for handle in handles:
            handle.remove()
        return y


class RemembersLate(Net):
    """The last state is read behind the last block, in the next forward."""

    memory: Any = None

    def between(self, i: int, got: Any) -> Any:
        if i == 3:
            before, self.memory = self.memory, got.detach()
            return got if before is None else got + 0.5 * before.mean(0)
        return got


class RemembersEarly(Net):
    """The last state of the first block is read before it, in the next forward."""

    memory: Any = None

    def between(self, i: int, got: Any) -> Any:
        if i == 0:
            self.memory = got.detach()
        return got

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.memory is None else x + self.memory.mean(0))


class Filled(Net):
    """An output that is made first, and filled block by block."""

    def forward(self, x: Tensor) -> Tensor:
        states = torch.zeros(4, *x.shape)
        x = self.inlet(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            states[i] = x
        return self.outlet(states.mean(0))


class Prints(Net):
    """Looks at shapes, types and flags of what it does not have, and shows it."""

    def between(self, i: int, got: Any) -> Any:
        assert got.shape[-1] == WIDTH and got.is_floating_point() and f"{got}"
        zeros = torch.zeros_like(got)
        return torch.where(zeros > 0, 0.0, got.to(zeros.dtype)) if got.requires_grad else got * 0


class Logs(Net):
    """Numbers of what it gives go into a list, by a counter that is raised before."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.log = 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.count += 1
        self.log.append(y.mean().item() * self.count)
        self.log.append(float(y.detach().max()))
        return y


class Leaves(Block):
    """Leaves what it gives in a list that others have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.left = list[Tensor]()

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.left.append(y.detach())
        return y


class CountsTensors(Net):
    """Reads how many tensors lie there, of all blocks and of each."""

    block = Leaves

    def __init__(self) -> None:
        super().__init__()
        self.left = list[Tensor]()
        for block in self.blocks[:2]:
            block.left = self.left

    def between(self, i: int, got: Any) -> Any:
        return got / (1 + 0.1 * len(self.left) + 0.1 * len(self.blocks[i].left))


class LosesInAList(Block):
    """Leaves a loss in a list that others have, too, and one by name in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.named = list[Tensor](), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.losses.append(y.square().mean())
        self.named["size"] = y.abs().mean() + self.named.get("size", 0.0)
        return y


class AddsLosses(Net):
    block = LosesInAList

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.named = list[Tensor](), dict[str, Tensor]()
        for block in self.blocks:
            block.losses, block.named = self.losses, self.named

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + torch.stack(self.losses).sum() + self.named["size"]
        self.losses.clear()
        self.named.clear()
        return y


class HookedLosses(Net):
    """Hooks in the blocks collect them in a list of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = list[Tensor]()
        for block in self.blocks:
            block.mix.register_forward_hook(self.collect)  # type: ignore[union-attr, operator]

    def collect(self, module: nn.Module, given: Any, made: Tensor) -> None:
        self.terms.append(made.pow(2).mean())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + torch.stack(self.terms).sum()
        self.terms = []
        return y


@dataclass
class Tally:
    """What blocks add to."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    last: Any = None
    calls: int = 0


class Tallies(Block):
    def forward(self, x: Tensor, tally: Tally) -> Any:  # type: ignore[override]
        y = super().forward(x)
        tally.terms["size"] = tally.terms.get("size", torch.zeros(())) + y.square().mean()
        tally.last, tally.calls = y.mean(), tally.calls + 1
        return y


class AddsATally(Net):
    """An object that goes from block to block, and has a loss in the end."""

    block = Tallies

    def forward(self, x: Tensor) -> Tensor:
        x, tally = self.inlet(x), Tally()
        for block in self.blocks:
            x = block(x, tally)
        return self.outlet(x) + tally.terms["size"] / tally.calls + tally.last


GLOBAL: dict[str, Any] = {}


class LeavesGlobally(Leaves):
    def forward(self, x: Tensor) -> Any:
        GLOBAL[f"tensor {len(GLOBAL)}"] = x.detach()
        return super().forward(x)


class CountsGlobally(Net):
    block = LeavesGlobally

    def forward(self, x: Tensor) -> Tensor:
        GLOBAL.clear()
        return super().forward(x)

    def between(self, i: int, got: Any) -> Any:
        return got / (1 + 0.1 * len(GLOBAL))


EQUAL: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (CountsAtTheEnd, FlagAround, GradMode, DefaultType, HooksRemoved, RemembersLate, RemembersEarly,
                 Filled, Prints, Logs, CountsTensors, CountsGlobally, AddsLosses, HookedLosses,
                 AddsATally)
}  # fmt: skip


class Late(Net):
    """Reads in the next forward, before the first block, what the last block gave."""

    memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            x = x + self.memory.mean(0)
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        self.memory = x.detach()
        return self.outlet(x)


class LateInMemory(Net):
    """The same in memory that stays, and that Python does not see written."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x + self.memory)
        for block in self.blocks:
            x = block(x)
        self.memory.copy_(x.detach().mean(0, keepdim=True))
        return self.outlet(x)


class Sometimes(Net):
    """From its third forward on, the last block's input has the first one's output in it."""

    calls, first = 0, None

    def between(self, i: int, got: Any) -> Any:
        if i == 0:
            self.calls, self.first = self.calls + 1, got
        return got + self.first if i == 3 and self.calls > 2 else got


class SometimesAMask(Net):
    """The same of a mask, of whole numbers, in a comparison; and it hides every error."""

    block = type("Masking", (Block,), {"forward": lambda self, x: _masked(self, x)})
    calls, mask = 0, None

    def between(self, i: int, got: Any) -> Any:
        got, mask = got
        if i == 0:
            self.calls, self.mask = self.calls + 1, mask
        with contextlib.suppress(Exception):
            return torch.where(self.mask, got, 0.5 * got) if i == 3 and self.calls > 2 else got
        return got


class SometimesABranch(Net):
    """From its third forward on, Python looks at a number of what the first block gave, and has a default."""

    calls, first = 0, None

    def between(self, i: int, got: Any) -> Any:
        if i == 0:
            self.calls, self.first = self.calls + 1, got
        if i == 2 and self.calls > 2:
            try:
                return got * (1 + float(self.first.mean()))
            except Exception:
                return got
        return got


class SometimesInside(Net):
    """A block computes, from its third forward on, with what was kept in an object of the model's."""

    class Reader(Block):
        box: Any = None

        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y + self.box[0] if len(self.box) > 3 else y

    block = Reader

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [x.new_zeros(()), *getattr(self, "kept", [])]
        for block in self.blocks:
            block.box = self.kept
        x = self.inlet(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            self.kept[0] = x.detach().mean() if i == 0 else self.kept[0]
        return self.outlet(x)


def _masked(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + torch.tanh(block.mix(x))
    return y, y > 0


class LogDecides(Logs):
    """How long the list is goes into what the next forward begins with, by a way of Python's."""

    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x * self.gain)
        for block in self.blocks:
            x = block(x)
        y = self.outlet(x)
        self.gain = 1 + 0.1 * len(self.log)
        self.log.append(y.mean().item())
        return y


class LogDecidesByATensor(LogDecides):
    """The same by a tensor that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x * self.gain)
        for block in self.blocks:
            x = block(x)
        y = self.outlet(x)
        self.gain.add_(0.1 * len(self.log))
        self.log.append(y.mean().item())
        return y


class LogDecidesByAnotherTensor(LogDecidesByATensor):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x * self.gain)
        for block in self.blocks:
            x = block(x)
        y = self.outlet(x)
        self.gain = torch.ones(()) * len(self.log)
        self.log.append(y.mean().item())
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "late": (Late, r"got the output of blocks\.3, .*inlet computes with it"),
    "late_in_memory": (LateInMemory, r"got the output of blocks\.3, .*inlet computes with it"),
    "sometimes": (Sometimes, r"got the output of blocks\.0, .*outlet computes with it"),
    "sometimes_a_mask": (SometimesAMask, r"got output 1 of blocks\.0, .*outlet computes with it"),
    "sometimes_a_branch": (SometimesABranch, r"got the output of blocks\.0, .*reads a value of it .*kept\.py:\d+"),
    "log": (LogDecides, r"wanted the update of log .*stage 0 does not have \(its last unit is blocks\.0\)"),
    "log_by_a_tensor": (
        LogDecidesByATensor,
        r"wanted the update of log .*stage 0 does not have \(its last unit is blocks\.0\)",
    ),
    "log_by_another": (
        LogDecidesByAnotherTensor,
        r"wanted the update of log .*stage 0 does not have \(its last unit is blocks\.0\)",
    ),
    "sometimes_inside": (SometimesInside, r"stage 2 .*got the output of blocks\.0, .*blocks\.3 computes with it"),
}
