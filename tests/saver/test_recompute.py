"""Recompute in one process: bit-equal to plain training, less memory, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import recipe, saver
from gossamer.model.source.hf import Hf
from gossamer.model.units import unit_names
from gossamer.saver import Site, install_all
from gossamer.saver.recompute import Recompute
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from model.tiny import CONFIGS, Plain
from saver.training import Busy, equal, trained

MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "busy": Busy,
    "gpt2": lambda: Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0),
    "llama": lambda: Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256).build(0),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_plain_training_bit_for_bit(kind: str, precision: str) -> None:
    """Dropout, tied weights, batch norm, buffers, counters, lists and Python's random numbers, in micro-batches."""
    plain = trained(MODELS[kind], [], precision=precision)
    settings = [Recompute(), Recompute(every=2)]
    if kind == "busy":
        settings.append(Recompute(units=("embed", "blocks.1", "head")))
    for setting in settings:
        assert equal(trained(MODELS[kind], [setting], precision=precision), plain), setting
    assert kind != "busy" or plain["counts"][0] == (6, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(("setting", "runs"), [(Recompute(), [12, 12, 12]), (Recompute(every=2), [12, 6, 12]),
                                               (Recompute(units=("blocks.1",)), [6, 12, 6])])  # fmt: skip
def test_the_units_run_twice(setting: Recompute, runs: list[int]) -> None:
    counts = [0, 0, 0]

    def watch(module: nn.Module) -> None:
        for place, block in enumerate(module.blocks):
            block.mix.register_forward_hook(lambda *_, place=place: counts.__setitem__(place, counts[place] + 1))

    trained(Plain, [setting], watch=watch)
    assert counts == runs


def test_outside_of_training_nothing_runs_twice() -> None:
    module, calls = Plain(), []
    install_all([Recompute()], module, site(module))
    module.blocks[0].mix.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.zeros(2, 4, dtype=torch.long)
    module.eval()(ids).sum().backward()
    with torch.no_grad():
        module.train()(ids)
    assert len(calls) == 2


def test_a_copy_recomputes_with_its_own_weights() -> None:
    module = Plain(dropout=0.0)
    install_all([Recompute()], module, site(module))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    ids = torch.arange(8).reshape(2, 4)
    other(ids).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in other.parameters())
    assert all(p.grad is None for p in module.parameters())


class InPlace(nn.Module):
    """Blocks of which one writes in place: to its argument, or to what it handed on, or to a buffer, later on."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)
        self.blocks = nn.ModuleList(InPlaceBlock(where) for _ in range(2))
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + 0
        for block in self.blocks:
            before = h
            h = block(h) + 0
            if self.where == "after":
                before.detach().add_(1)
        return self.head(h)


class InPlaceBlock(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, [0]
        self.register_buffer("late", torch.zeros(()))
        self.first = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        self.calls[0] += 1
        if self.where == "argument":
            h.detach().add_(1)
        if self.where == "late" and self.calls[0] > 2:
            self.late += 1
        return torch.tanh(self.first(h * 2) + self.late)


@pytest.mark.parametrize(("where", "said"), [
    ("argument", "does not write in place to its argument 0"),
    ("after", "nor may other code after it"),
    ("late", "late, to which it did not write in its first forward"),
])  # fmt: skip
def test_what_a_second_run_would_find_changed_is_refused(where: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        trained(lambda: InPlace(where), [Recompute()])


@pytest.mark.parametrize(("written", "said"), [
    ({"recompute": {"every": 0}}, "1 or more"),
    ({"recompute": {"every": 2, "budget": "1GiB"}}, "every 2 beside budget"),
    ({"recompute": {"every": 2, "units": ["a"]}}, "every 2 beside units"),
    ({"recompute": {"budget": "1 GiX"}}, "a size such as 500MB or 4GiB"),
    ("recomputed", "recompute"),
])  # fmt: skip
def test_wrong_settings(written: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        saver.build(written, key="plan.savers")


def test_a_unit_that_the_model_does_not_have() -> None:
    module = Plain()
    with pytest.raises(BadInput, match=r"blocks\.2"):
        install_all([Recompute(units=("blocks.7",))], module, site(module))
    assert not any("forward" in vars(inner) for inner in module.modules())


@pytest.mark.parametrize(("savers", "plan", "said"), [
    (["recompute", {"recompute": {"every": 2}}], {}, "every saver once"),
    (["recompute"], {"sync": "just_one_byte"}, "a backward pass, whose memory a saver saves"),
])  # fmt: skip
def test_what_it_cannot_be_combined_with(savers: list[Any], plan: dict[str, Any], said: str) -> None:
    config = RunConfig.model_validate(
        {"train": {"batch": 8, "optimizer": {"sgd": {"lr": 1e-4}}}, "plan": {"savers": savers, **plan}}
    )
    made = Plan.model_validate({"rows": [8], "microbatches": [4], "savers": savers, **plan})
    with pytest.raises(BadInput, match=said):
        recipe.check(config, made)


def site(module: nn.Module) -> Site:
    from gossamer import loss

    return Site(units=unit_names(module), objective=loss.build("next_token"))
