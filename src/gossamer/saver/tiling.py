"""Tiling: large linear layers run as a sequence of tiles of their outputs, and hold the working memory of one.

Equations (tile i has the rows W_i of the weight and b_i of the bias; g_i: the gradient of its outputs):
    y_i = x W_i^T + b_i;   dx = sum over i of g_i W_i;   dW_i = g_i^T x;   db = sum of g over rows
Symbols: x inputs (rows, in), W (out, in), y outputs; each product in the precision of the run.
Memory: with train.precision bf16 or fp16 plain training keeps a copy of W in that type from forward to backward, of 2
        bytes per element, and makes dW in it before it is widened. Here only a tile of both is there at one time. In
        float32 there are no such copies, and nothing is saved.
Work:   the same products in smaller pieces; W is converted twice in place of once.
Result: equal up to the order of sums in dx, 1e-5 in float32. Evaluation runs the plain layer.
Paper:  Rajbhandari et al., ZeRO-Infinity, SC 2021, arXiv 2104.07857, section 5.1.3 (memory-centric tiling).
Tiers:  with plan.sharding tiers two tiles of a weight are in memory at one time, one that is used and one that is read
        ahead, and evaluation runs in tiles too. A weight that other code reads as well (a tied embedding) stays whole.
Unlike the paper: tiles are rows of one parameter, and not parameters of their own, so that names and state dict stay as
        they are. Gradients and the optimizer states of an update are whole, also with tiers.
Good when: linear layers have few rows of inputs beside large weights.   Not for: compiled models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.unit_forward import UnitForward
from gossamer.saver import Installed, Saver, Site
from gossamer.sharding import TiledWeight
from gossamer.spec.errors import BadInput, bad_input
from gossamer.spec.units import read_size, show_bytes

_KEY = "plan.savers.tiling"
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling(Saver):
    """Linear layers in tiles. `tiles`: how many of each layer, of nearly equal numbers of outputs.

    `linears`: auto takes layers whose weight has `least` bytes or more; else a pattern of their names, such as
    *.mlp.*_proj.
    """

    is_exact: ClassVar[bool] = False
    with_sharded_parameters: ClassVar[bool] = True

    linears: str = "auto"
    tiles: int = 4
    least: str | int = "64MiB"

    def __post_init__(self) -> None:
        if self.tiles < 2:
            raise bad_input(wanted="2 or more", got=str(self.tiles), do="write how many tiles a layer has", key="tiles")
        read_size(self.least, key="least")

    def install(self, module: nn.Module, site: Site) -> Installed:
        found = self._chosen(module)
        if any(getattr(one, "_compiled_call_impl", None) is not None for one in module.modules()):
            raise bad_input(
                wanted="a model that is not compiled, whose layers are called one by one",
                got="model.compile true",
                do="set model.compile to false, or leave tiling out",
                key=_KEY,
            )
        names = {id(param): name for name, param in module.named_parameters()}
        there = [
            _TiledForward(one, TiledWeight(names[id(one.weight)], spans(one.out_features, self.tiles)))
            for one in found.values()
            if not isinstance(one.weight, AbsentTensor)
        ]
        tiled = tuple(one.source for one in there)

        def remove() -> None:
            while there:
                there.pop().put_back()

        most = max((one.layer.weight.nbytes for one in there), default=0)
        told = (
            f"tiling: {len(there)} linear layers run in {self.tiles} tiles; the largest weight takes {show_bytes(most)}"
        )
        return Installed(remove=remove, objective=site.objective, told=told, tiled=tiled)

    def _chosen(self, module: nn.Module) -> dict[str, nn.Linear]:
        """Return the layers to tile, by name, those of other stages too.

        Raises BadInput where there are none, or one has too few outputs: the same on every rank.
        """
        each = ((name, one) for name, one in module.named_modules() if type(one) is nn.Linear)
        # Others make their weight anew before each call: torch's weight_norm, spectral_norm and prune, by hooks.
        named = {name: one for name, one in each if isinstance(one.weight, nn.Parameter | AbsentTensor)}
        is_auto, least = self.linears == "auto", read_size(self.least, key="least")
        found = {
            name: one
            for name, one in named.items()
            if (one.weight.nbytes >= least if is_auto else fnmatchcase(name, self.linears))
        }
        if not found:
            raise self._none(named)
        few = next((name for name, one in found.items() if one.out_features < self.tiles), None)
        if few is not None:
            raise bad_input(
                wanted=f"layers with {self.tiles} outputs or more, as many as tiles",
                got=f"{few} with {named[few].out_features}",
                do="set fewer tiles, or name other layers",
                key=f"{_KEY}.tiles",
            )
        return found

    def _none(self, named: dict[str, nn.Linear]) -> BadInput:
        largest = sorted(named, key=lambda name: -named[name].weight.nbytes)[:_SHOWN]
        shown = ", ".join(f"{name} ({show_bytes(named[name].weight.nbytes)})" for name in largest)
        what = f"of {self.least} or more" if self.linears == "auto" else f"named {self.linears}"
        return bad_input(
            wanted=f"linear layers (nn.Linear) {what}",
            got=f"none; the largest are {shown}" if largest else "a model without any",
            do="name some of these in linears, or lower least" if largest else "leave tiling out",
            key=f"{_KEY}.linears",
        )


class _TiledForward(UnitForward):
    """The forward of a linear layer, whose product is made tile by tile: in training, and where its weight is away."""

    def __init__(self, layer: nn.Linear, source: TiledWeight) -> None:
        self.layer, self.source, self._mode = layer, source, _TiledProduct(layer, source)
        super().__init__(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_plain = not torch.is_grad_enabled() or not self.unit.training
        if is_plain and self.source.read is None:
            return self.real(*args, **kwargs)
        with self._mode:
            return self.real(*args, **kwargs)


class _TiledProduct(TorchFunctionMode):
    """A mode in which the product with one layer's weight is made tile by tile.

    The layer's own forward runs, with whatever else is around it (seeds, a head that makes no logits).
    """

    def __init__(self, layer: nn.Linear, source: TiledWeight) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._source = layer, source

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.linear and len(args) > 1 and args[1] is self._layer.weight and _is_plain(args[0]):
            bias = args[2] if len(args) > 2 else given.get("bias")
            return _Tiles.apply(args[0], args[1], bias, self._source)  # type: ignore[no-untyped-call]
        return func(*args, **given)


class _Tiles(torch.autograd.Function):
    """The product of inputs with a weight, tile by tile of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, source: TiledWeight) -> Tensor:
        kind = _computed_in(x, weight)
        ctx.source, ctx.bias_dtype, ctx.given_dtype = source, None if bias is None else bias.dtype, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(kind)
            flat = x.reshape(-1, x.shape[-1])
            out = flat.new_empty(*x.shape[:-1], weight.shape[0])  # no view: others may write to it in place
            rows = out.view(flat.shape[0], weight.shape[0])
            for (low, high), part in _parts(source, weight, kind):
                if bias is None:
                    torch.mm(flat, part.t(), out=rows[:, low:high])
                else:
                    torch.addmm(bias[low:high].to(kind), flat, part.t(), out=rows[:, low:high])
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        flat, outer = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, weight.shape[0])
        of_x = torch.zeros_like(flat, dtype=_summed_in(flat.dtype)) if needs_x else None
        of_weight = weight.new_empty(weight.shape) if needs_weight else None
        with torch.autocast(x.device.type, enabled=False):
            if of_x is not None:
                for (low, high), part in _parts(ctx.source, weight, outer.dtype):
                    of_x.add_(outer[:, low:high] @ part)
            if of_weight is not None:
                for low, high in ctx.source.rows:
                    of_weight[low:high] = outer[:, low:high].t() @ flat
            of_bias = outer.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return None if of_x is None else of_x.to(ctx.given_dtype).view(x.shape), of_weight, of_bias, None


def _parts(source: TiledWeight, weight: Tensor, kind: torch.dtype) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield (first, end) of the rows of each tile, and the rows in the type of the product."""
    source.is_running = True
    try:
        for index, rows in enumerate(source.rows):
            yield rows, source.part(weight, index).to(kind)
    finally:
        source.is_running = False


def spans(outputs: int, tiles: int) -> tuple[tuple[int, int], ...]:
    """Return (first, end) of the rows of each tile."""
    return tuple((outputs * index // tiles, outputs * (index + 1) // tiles) for index in range(tiles))


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor or isinstance(x, FakeTensor)


def _computed_in(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes: that of autocast, where it is on."""
    kind, is_wide = x.device.type, torch.float64 in (x.dtype, weight.dtype)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and not is_wide else x.dtype


def _summed_in(kind: torch.dtype) -> torch.dtype:
    return torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
