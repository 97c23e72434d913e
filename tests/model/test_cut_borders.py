"""What is set on a tensor, or is one with another, is the same on both sides of a border, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.split.reference import stages_of
from gossamer.model.split.split_points import SplitPoints, balanced_split, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.kept import WIDTH, Block, Net
from model.pythonic import mixed, net
from model.test_cut_absent import BATCHES, compare, loss_of


def hooked(module: Any, i: int, got: Tensor) -> Tensor:
    if got.requires_grad:
        got.register_hook(lambda g: g.clamp(-1e-3, 1e-3) * 0.5)
    return got


def hooked_sum(module: Any, i: int, got: Tensor) -> Tensor:
    module.first = got if i == 0 else module.first
    return hooked(module, i, got) + (module.first if i in (1, 3) else 0)


def hooked_within(block: Any, x: Tensor) -> Tensor:
    y = mixed(block, x)
    y.register_hook(lambda g: g * 0.5)
    return y


def twice(block: Any, x: Tensor) -> Any:
    y = mixed(block, x)
    return y, y


def turned(block: Any, x: Tensor) -> Any:
    return mixed(block, x).t().contiguous().t()


def strided(module: Any, i: int, got: Tensor) -> Tensor:
    return got + 0.1 * got.as_strided((4, WIDTH), (1, 4)) + got.t().reshape(4, WIDTH)


def with_generator(module: Any, i: int, got: Tensor) -> Tensor:
    return got * torch.rand(WIDTH, generator=module.generator)


class Drawing(Net):
    """From a generator of its own: between its blocks, and in them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        for block in self.blocks:
            block.generator = self.generator

    block = type(
        "Rolling", (Block,), {"forward": lambda self, x: mixed(self, x) * torch.rand(1, generator=self.generator)}
    )

    def between(self, i: int, got: Any) -> Any:
        return got * torch.rand(WIDTH, generator=self.generator)


class Tables(Net):
    """Blocks ask a function that keeps what it gave for a table."""

    block = type("Looking", (Block,), {"forward": lambda self, x: mixed(self, x) + table(WIDTH)})


def _memo(make: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    import functools

    return functools.lru_cache(make)


@_memo
def table(width: int) -> Tensor:
    return torch.arange(width) / width


EQUAL: dict[str, Callable[[], nn.Module]] = {
    "hooked": net(between=hooked),
    "hooked_within": net(hooked_within),
    "twice": net(twice, lambda m, i, got: got[0] * (2.0 if got[0] is got[1] else 1.0)),
    "turned": net(turned, strided),
    "drawing": Drawing,
    "tables": Tables,
}


@pytest.mark.parametrize(
    "cuts", [SplitPoints(("inlet", "blocks.1", "blocks.3")), SplitPoints(("inlet", "blocks.2"))], ids=str
)
@pytest.mark.parametrize("kind", EQUAL)
def test_borders_do_not_show(kind: str, cuts: SplitPoints) -> None:
    torch.manual_seed(0)
    compare(EQUAL[kind](), cuts)
    assert float(table(WIDTH).sum()) == 3.5, "no tensor of a trace is left in it"


def viewed(block: Any, x: Tensor) -> Any:
    y = block.mix(x)
    return y, y[:, :1]


def doubled(module: Any, i: int, got: Any) -> Tensor:
    got[1].mul_(2.0)
    return got[0] + 0 * got[1]


def labeled(block: Any, x: Tensor) -> Tensor:
    y = mixed(block, x)
    y.gain = 1.3
    return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "views_that_are_written": (net(viewed, doubled), r"blocks\.\d to return .*share no memory.*outputs 0, 1"),
    "labeled": (
        net(labeled, lambda m, i, got: got * getattr(got, "gain", 1.0)),
        r"blocks\.\d to produce a plain.*attributes gain",
    ),
    "hooked_and_read_in_two_stages": (
        net(between=hooked_sum),
        r"readers of the output of blocks\.0 in one stage, as a hook is set",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_or_are_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    make, said = REFUSED[kind]
    with pytest.raises(BadInput, match=said):
        compare(make())


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(WIDTH, WIDTH)
        self.outlet.weight = self.inlet.weight


def test_a_hook_on_a_parameter_of_several_stages_is_refused_and_one_of_a_single_stage_is_not() -> None:
    module = Tied()
    compare(module)
    module.blocks[1].mix.weight.register_hook(lambda g: g * 0.5)
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    assert len(stages_of(module, flow, balanced_split(flow, 2))) == 2
    module.inlet.weight.register_hook(lambda g: g.sign())
    stage = stages_of_hooked(module, flow)
    with pytest.raises(BadInput, match=r"wanted no hook on inlet\.weight, which several stages hold"):
        stage()


def stages_of_hooked(module: nn.Module, flow: Any) -> Callable[[], Any]:
    """A copy of a module has no hooks on its parameters, so of itself."""
    from gossamer.model.split.stage import StageModule

    part = stage_specs(module, flow, balanced_split(flow, 2))[0]
    return lambda: StageModule(module, flow, part)


def test_a_sparse_output_is_refused() -> None:
    module = net(lambda block, x: mixed(block, x).to_sparse(), lambda m, i, got: got.to_dense())()
    flow = trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
    with pytest.raises(BadInput, match=r"blocks\.0 to return.*got a tensor of layout torch\.sparse_coo"):
        stage_specs(module, flow, SplitPoints(("inlet", "blocks.1")))


def test_a_call_in_a_thread_of_the_model_s_own_is_refused() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def threaded(module: Any, x: Tensor) -> Tensor:
        x = module.inlet(x)
        with ThreadPoolExecutor(1) as pool:
            for block in module.blocks:
                x = pool.submit(block, x).result()
        return module.outlet(x)

    module = net(forward=threaded)()
    with pytest.raises(BadInput, match=r"blocks\.0 to be called in the thread that runs the forward"):
        trace(module, lambda: loss_of(module, BATCHES[0]), units=unit_names(module))
