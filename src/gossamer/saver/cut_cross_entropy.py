"""CutCrossEntropy: the loss of a large vocabulary, and its gradients, without the logits.

    plain: logits (N, V), their log-softmax and its gradient: 12 bytes a logit in float32
    here:  a tile of logits at a time, and the gradients that training has anyway (ops/cut_cross_entropy.py)

Symbols: N tokens of a micro-batch, V words. The model's own forward runs, and so does its own loss, with soft caps,
scales and terms of its own: its head returns a tensor that is not computed until something other than a cross-entropy
asks for it. Before step 1 the loss and every gradient of a training row are compared with those of the plain way.
E. Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, https://arxiv.org/abs/2411.09009.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gossamer.model.forward_adapter import caller_of
from gossamer.model.side_effects import untouched
from gossamer.ops.cut_cross_entropy import HeadLoss, cut_bytes, plain_bytes
from gossamer.saver import Installed, Saver, Site
from gossamer.saver.head.cut_head import (
    By,
    CutHead,
    HeadWatch,
    head_of,
    needed_otherwise,
    refused,
    tolerance_of,
    unequal,
)
from gossamer.saver.head.unmade_logits import ChangedInPlaceError
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_bytes

_KEY = "plan.savers"
_TOKENS = 64  # of the row that is compared: enough for a gradient of every parameter, and quick


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCrossEntropy(Saver):
    """Cross-entropy in tiles, without the logits: equal to the plain one to 1e-5 in the loss and every gradient.

    gradients   forward: made with the loss, in about the time of the plain one, holding up to 128 MiB of logits at a
                time; backward: computed again there, up to a third slower, with 4 MiB. In pipeline stages always
                backward
    filter      leaves out the gradient of words whose probability is below it for every token of a tile: faster, and
                wrong at the start of training, where all words are unlikely. For models that are trained already, such
                as 1e-7; with gradients: backward
    by          tiles: computed here; torch: by its linear_cross_entropy where the model neither caps nor scales its
                logits, tiles elsewhere; liger: by Liger's kernel, for CUDA alone, which no test of this project has run
    """

    is_exact: ClassVar[bool] = False
    before: ClassVar[tuple[str, ...]] = ("fp8_activations",)  # its check compares with exact gradients

    gradients: Literal["forward", "backward"] = "forward"
    filter: float = 0.0
    by: By = "tiles"

    def __post_init__(self) -> None:
        if not 0 <= self.filter < 1:
            raise bad_input(wanted="a probability from 0 to below 1", got=str(self.filter), do="leave filter out")
        if self.filter and (self.gradients != "backward" or self.by != "tiles"):
            got = f"gradients: {self.gradients}, by: {self.by}"
            raise bad_input(
                wanted="gradients: backward, by: tiles with a filter, which is for them", got=got, do="leave filter out"
            )

    def install(self, module: nn.Module, site: Site) -> Installed:
        self._check_backend(module)
        name, head = head_of(module)
        cut = CutHead(
            head=head,
            by=self.by,
            in_forward=self.gradients == "forward" and not site.in_stages,
            filter=self.filter,
            is_outline=site.is_outline,
            compares=True,
            refuses=site.in_stages,
        )
        if site.is_outline or site.in_stages or site.batch is None:
            return Installed(remove=HeadWatch(cut).remove, objective=site.objective, told=self._told(name, cut, site))
        return Installed(remove=_proved(module, cut, site), objective=site.objective, told=self._told(name, cut, site))

    def _check_backend(self, module: nn.Module) -> None:
        first = next(module.parameters(), None)
        if self.by == "liger" and (first is None or first.device.type != "cuda"):
            got = "no parameters" if first is None else f"a model on {first.device.type}"
            raise bad_input(wanted="a model on a CUDA device for Liger", got=got, do="set by: tiles", key=_KEY)
        if self.by == "liger" and importlib.util.find_spec("liger_kernel") is None:
            raise bad_input(
                wanted="the package liger-kernel", got="none", do="pip install liger-kernel, or set by: tiles", key=_KEY
            )
        if self.by == "torch" and not hasattr(F, "linear_cross_entropy"):
            got = f"torch {torch.__version__}, which has none"
            raise bad_input(wanted="a torch with linear_cross_entropy", got=got, do="set by: tiles", key=_KEY)

    def _told(self, name: str, cut: CutHead, site: Site) -> str:
        """Return what the loss of a micro-batch takes in both ways."""
        if site.batch is None or site.is_outline:
            return ""
        tokens = int(site.objective.weight(site.batch)) * site.rows
        words, size = cut.head.weight.shape[0], cut.head.weight.element_size()
        makes = cut.head.weight.requires_grad
        ours = cut_bytes(tokens, words, in_forward=cut.in_forward, makes_weight=makes, head=HeadLoss())
        plain = plain_bytes(tokens, words, size)
        said = f"the loss of {tokens} tokens over {words} words ({name}) takes {show_bytes(ours)}"
        return f"cut_cross_entropy: {said}, and {show_bytes(plain)} with all logits"


def _proved(module: nn.Module, cut: CutHead, site: Site) -> Any:
    """Install on the head, once loss and gradients of a row are those of the plain way; return what undoes it.

    Raises BadInput where they are not, or where something else needs the logits.
    """
    assert site.batch is not None
    rows = _shortened(site.batch, site)
    tolerance = max(tolerance_of(one.dtype) for one in module.parameters() if one.is_floating_point())
    with untouched(module):
        plain = _gradients(module, rows, site)
    watch = HeadWatch(cut)
    try:
        with untouched(module):
            ours = _gradients(module, rows, site)
        if cut.made:
            raise needed_otherwise(cut.made)
        if not cut.losses:
            raise refused("a loss that does not read the output of its last linear module")
        if said := unequal(plain, ours, tolerance, cut.filter):
            raise refused(f"a loss or gradients that differ from the plain ones: {said}")
    except ChangedInPlaceError as error:
        watch.remove()
        raise refused(str(error)) from None
    except BaseException:
        watch.remove()
        raise
    cut.losses = 0
    return watch.remove


def _shortened(batch: Mapping[str, Tensor], site: Site) -> dict[str, Tensor]:
    """Return the first tokens of a batch whose tensors are all (rows, tokens), if some of them have labels."""
    shapes = {one.shape for one in batch.values()}
    if len(shapes) == 1 and len(next(iter(shapes))) == 2:
        short = {name: one[:, :_TOKENS] for name, one in batch.items()}
        if int(site.objective.weight(short)):
            return short
    return dict(batch)


def _gradients(module: nn.Module, rows: Mapping[str, Tensor], site: Site) -> dict[str, Tensor]:
    """Return the loss of `rows`, then the gradient of every parameter that has one, by name."""
    copies = {name: one.clone() for name, one in rows.items()}
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    with torch.enable_grad(), site.drawing():
        loss = site.objective(caller_of(module, copies)(module, copies), copies).float()
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    each = zip(trained, found, strict=True)
    return {"loss": loss.detach(), **{name: one for name, one in each if one is not None}}
