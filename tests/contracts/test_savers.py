"""Every saver beside plain training: the same weights or nearly so, the same evaluation, and nothing left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from itertools import permutations

import pytest
import torch
from torch import nn

from gossamer import loss, saver
from gossamer.model.source.hf import Hf
from gossamer.model.units import unit_names
from gossamer.saver import Saver, Site
from model.tiny import CONFIGS, batch
from saver.training import equal, trained

SWAP = {"host": "8MiB", "file": "16MiB", "directory": tempfile.gettempdir(), "least": 1}
SETTINGS: Mapping[str, tuple[object, ...]] = {
    "recompute": ("recompute", {"recompute": {"every": 2}}),
    "activation_swap": ({"activation_swap": SWAP},),
    "tiling": ({"tiling": {"linears": "lm_head", "tiles": 3}},),
}
WRITTEN = [one for name in saver.names() for one in SETTINGS.get(name, (name,))]


def gpt2() -> nn.Module:
    return Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0)


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_it_trains_as_plain_training_does(written: object) -> None:
    built: Saver = saver.build(written)
    plain, ours = trained(gpt2, []), trained(gpt2, [built])
    if built.is_exact:
        assert equal(ours, plain)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=2e-2)


@pytest.mark.parametrize("with_file", [False, True])
def test_savers_go_together_in_any_order(with_file: bool) -> None:
    tiles = {"tiling": {"linears": "lm_head", "tiles": 3}}
    first: object = {"activation_swap": SWAP} if with_file else "fp8_activations"
    each: list[Saver] = [saver.build(one) for one in (first, "cut_cross_entropy", tiles)]
    plain = trained(gpt2, [])
    for order in permutations(each):
        assert trained(gpt2, order)["losses"] == pytest.approx(plain["losses"], rel=1e-5 if with_file else 2e-2)


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_an_evaluation_gives_what_it_gave(written: object) -> None:
    module, ids = gpt2().eval(), batch()["input_ids"]
    with torch.no_grad():
        before = module(ids).logits
        there = saver.build(written).install(module, Site(units=unit_names(module), objective=loss.build("next_token")))
        assert torch.equal(module(ids).logits, before)
        there.remove()
    assert not any("forward" in vars(inner) for inner in module.modules())
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())
