"""Linear layers in tiles: outputs and gradients beside those of the plain layer, and what is there at one time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer import loss
from gossamer.model.ghost_step import ghost_step
from gossamer.model.source.hf import Hf
from gossamer.model.units import unit_names
from gossamer.saver import Saver, Site, build
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS
from saver.training import trained

SITE = Site(units=(), objective=loss.build("next_token"))


def tiling(**settings: Any) -> Saver:
    built: Saver = build({"tiling": settings})
    return built


def llama() -> nn.Module:
    return Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256).build(0)


def gradients(layer: nn.Linear, x: Tensor, *, by: torch.dtype | None) -> tuple[Tensor, ...]:
    """The output, and the gradients of x, the weight and the bias, of a sum with fixed weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", by or torch.bfloat16, enabled=by is not None):
        out = layer(x)
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    given = [x, *layer.parameters()]
    return out, *torch.autograd.grad((out * factor).sum(), given)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 7, 24), (0, 24)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("tiles", [2, 5, 31])
@pytest.mark.parametrize(
    ("kind", "by", "off"),
    [(torch.float32, None, 1e-5), (torch.float64, None, 1e-13), (torch.float32, torch.bfloat16, 2e-2)],
)
def test_outputs_and_all_gradients_are_those_of_the_plain_layer(
    shape: tuple[int, ...], has_bias: bool, tiles: int, kind: torch.dtype, by: torch.dtype | None, off: float
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 31, bias=has_bias).to(kind)
    x = torch.randn(shape, dtype=kind)
    wanted = gradients(layer, x, by=by)
    there = tiling(linears="0", tiles=tiles).install(nn.Sequential(layer), SITE)
    found = gradients(layer, x, by=by)
    there.remove()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert float((one - other).detach().norm()) <= off * float(other.detach().norm())


@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 7, 24)])
def test_what_follows_may_write_to_the_output_in_place(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 31), nn.ReLU(inplace=True))
    x = torch.randn(shape)
    wanted = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
    tiling(linears="0", tiles=3).install(module, SITE)
    found = torch.autograd.grad(module(x).square().sum(), [*module.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_trains_as_before_with_the_same_names(precision: str) -> None:
    savers = [tiling(linears="*proj", tiles=3)]
    plain = trained(llama, [], precision=precision)
    told: list[list[str]] = []
    apart: list[str] = []  # layers with a forward of their own

    def watch(module: nn.Module) -> None:
        told.append(list(module.state_dict()))
        apart.extend(name for name, one in module.named_modules() if "forward" in vars(one))

    ours = trained(llama, savers, precision=precision, watch=watch)
    assert list(plain["state"]) == list(ours["state"]) == told[0]
    assert {name.rpartition(".")[2] for name in apart} >= {"q_proj", "down_proj"}
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5 if precision == "fp32" else 1e-2)


class Sizes(TorchDispatchMode):
    """The numbers of elements of all tensors in bfloat16 that are made, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.dtype == torch.bfloat16 and not func.is_view:
                self.made.add(one.numel())
        return out


def test_a_tile_of_the_weight_in_bf16_is_there_at_one_time() -> None:
    """Forward and backward; plain training makes all of it in both."""
    found = []
    for tiles in (0, 4):
        module = nn.Sequential(nn.Linear(64, 128))
        if tiles:
            tiling(linears="0", tiles=tiles).install(module, SITE)
        x = torch.randn(3, 64)
        with Sizes() as sizes:
            with torch.autocast("cpu", torch.bfloat16):
                out = module(x)
            out.float().sum().backward()
        found.append(max(sizes.made))
    assert found == [64 * 128, 64 * 128 // 4]


def test_the_memory_forecast_counts_no_copy_of_the_weights() -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    copies = 2 * (256 * 256 * 2)  # the first layer has no gradient of its inputs, and keeps none
    kept = []
    for tiles in (0, 4):

        def run(outline: nn.Module, tiles: int = tiles) -> Tensor:
            if tiles:
                site = Site(units=unit_names(outline), objective=SITE.objective, is_outline=True)
                tiling(linears="*", tiles=tiles).install(outline, site)
            with torch.autocast("cpu", torch.bfloat16):
                found: Tensor = outline(torch.zeros(2, 256))
            return found.float().sum()

        kept.append(sum(ghost_step(module, run).kept))
    assert copies * 0.9 < kept[0] - kept[1] < copies * 1.1


def test_large_layers_are_found_by_bytes() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False))
    there = tiling(least=64 * 256 * 4).install(module, SITE)
    assert ["forward" in vars(layer) for layer in module] == [False, True, True]
    assert "2 linear layers run in 4 tiles" in there.told
    there.remove()
    assert not any("forward" in vars(layer) for layer in module)


@pytest.mark.parametrize("order", [1, -1])
def test_beside_a_cut_loss_and_recompute(order: int) -> None:
    """The head has tiles of both, whichever is on top."""
    plain = trained(llama, [])
    savers = [tiling(linears="*", tiles=2), build("cut_cross_entropy"), build("recompute")][::order]
    assert trained(llama, savers)["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize("made", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_layer_whose_weight_is_made_by_a_hook_stays_plain(made: Any) -> None:
    module = nn.Sequential(made(nn.Linear(8, 8)), nn.Linear(8, 8))
    there = tiling(linears="*", tiles=2).install(module, SITE)
    assert [one.name for one in there.tiled] == ["1.weight"]
    with pytest.raises(BadInput, match="none; the largest are 1"):
        tiling(linears="0", tiles=2).install(module, SITE)


def test_bad_input() -> None:
    module = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    for settings, wanted in (
        ({"tiles": 1}, "2 or more"),
        ({"least": "much"}, "a size such as"),
    ):
        with pytest.raises(BadInput, match=wanted):
            tiling(**settings)
    for settings, wanted in (
        ({}, r"of 64MiB or more, got none; the largest are 0 \(96 B\), 1 \(96 B\)"),
        ({"linears": "*.up"}, "named "),
        ({"linears": "0", "tiles": 4}, "4 outputs or more, as many as tiles, got 0 with 3"),
    ):
        with pytest.raises(BadInput, match=wanted):
            tiling(**settings).install(module, SITE)
    with pytest.raises(BadInput, match="a model without any"):
        tiling().install(nn.Identity(), SITE)
    module.compile()
    with pytest.raises(BadInput, match=r"model\.compile"):
        tiling(linears="1").install(module, SITE)
    assert not any("forward" in vars(layer) for layer in module)
