"""One quantized model for all budgets: sampled widths, gradients, subnets bit for bit, sizes, the search."""

from __future__ import annotations

import copy
import random
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.data.tokenizer.byte import Bytes
from gossamer.model.bit_widths import BitWidths, best_widths
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.model.qfa_linear import bit_widths, extract, nbytes_at, qfa_layers, set_widths
from gossamer.model.quantized_folder import quantized_content
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from gossamer.recipe import Recipe
from gossamer.recipe.conflicts.supernet import supernet_alone
from gossamer.spec.config import ModelSection, RunConfig
from gossamer.spec.errors import BadInput
from gossamer.spec.plan import Plan
from gossamer.store.quantized_folder import write_quantized
from model.tiny import CONFIGS, SIZES, VOCABULARY, batch

LAYERS = BitWidths(tuple(f"l{i}" for i in range(14)), (64,) * 7 + (128,) * 7, (2, 3, 4), 32)


def section(kind: str = "llama", **more: object) -> ModelSection:
    config = {**CONFIGS[kind], "vocab_size": VOCABULARY}
    return ModelSection(hf=kind, config=config, adapter={"qfa": {"rank": 2, "group": 32, **more}})


def supernet(kind: str = "llama") -> nn.Module:
    """One whose adapters have moved."""
    module = origin_of(section(kind)).build(0)
    generator = torch.Generator().manual_seed(1)
    for layer in qfa_layers(module).values():
        for _, tensor in layer.slots():
            tensor.data.normal_(0, 0.1, generator=generator)
    return module


def logits(module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = module.eval()(**batch()).logits
    return found


def test_average_widths_of_steps_are_spread_evenly_where_independent_draws_crowd_in_the_middle() -> None:
    ours = [LAYERS.average(LAYERS.at(0, step)) for step in range(640)]
    draws = random.Random(0)
    alone = [LAYERS.average(tuple(draws.choices((2, 3, 4), k=14))) for _ in range(640)]
    quarters = [sum(low <= one < low + 0.5 for one in ours) / 640 for low in (2.0, 2.5, 3.0)]
    assert all(0.2 < share < 0.3 for share in quarters)
    assert sum(2.5 <= one < 3.5 for one in alone) > 0.95 * 640
    assert statistics.stdev(ours) > 2 * statistics.stdev(alone)


def test_widths_of_a_step_meet_its_target_and_follow_from_seed_and_step_alone() -> None:
    for step in range(64):
        assert abs(LAYERS.average(LAYERS.at(3, step)) - LAYERS.target(step)) <= 0.5 * 128 / sum(LAYERS.sizes) + 1e-9
        assert LAYERS.at(3, step) == copy.deepcopy(LAYERS).at(3, step)
    assert LAYERS.at(3, 10) != LAYERS.at(4, 10)
    assert [LAYERS.target(step) for step in (0, 8, 16, 24, 32)] == [2, 3, 4, 3, 2]


def test_a_step_trains_the_adapters_of_its_widths_and_no_others() -> None:
    module = origin_of(section()).build(0).train()
    seeds = unit_seeds(module, unit_names(module), seed=5)
    chosen = bit_widths(module).at(5, 9)
    assert len(set(chosen)) > 1
    with seeds.at(9, 0):
        module(**batch()).loss.backward()
    for (name, layer), bits in zip(qfa_layers(module).items(), chosen, strict=True):
        for slot, tensor in layer.slots():
            assert (tensor.grad is not None) == slot.endswith(f"_{bits}"), (name, slot)
    own = {id(tensor) for layer in qfa_layers(module).values() for _, tensor in layer.slots()}
    assert all(id(p) in own for p in module.parameters() if p.requires_grad)
    module.zero_grad()
    for key in (0, 1):  # another micro-batch, or another rank, of that step
        with seeds.at(9, key):
            assert [layer.step_width for layer in qfa_layers(module).values()] == list(chosen)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # nn.Linear; Conv1D, whose weight lies turned
def test_a_subnet_computes_what_the_supernet_does_bit_for_bit_also_from_its_folder(tmp_path: Path, kind: str) -> None:
    module = supernet(kind)
    chosen = bit_widths(module).near(2.6, random.Random(0))
    set_widths(module, chosen)
    expected, size = logits(module), nbytes_at(module, chosen)
    subnet = copy.deepcopy(module)
    extract(subnet, chosen)
    assert torch.equal(logits(subnet), expected)
    held = {id(one): one.nbytes for one in subnet.state_dict(keep_vars=True).values()}  # tied ones once
    assert nbytes_at(subnet, tuple(chosen)) == size == sum(held.values())
    origin = origin_of(section(kind))
    content = quantized_content(subnet, origin, Bytes(), method="qfa", said={}, dtype=torch.float32)
    assert write_quantized(tmp_path / "out", content) == size
    again = origin_of(ModelSection(hf=str(tmp_path / "out"))).build(0)
    assert torch.equal(logits(again), expected)
    export_hf(again, origin, Bytes(), tmp_path / "hf")
    merged = origin_of(ModelSection(hf=str(tmp_path / "hf"))).build(0)
    assert (logits(merged) - expected).abs().max() < 1e-5


def test_more_bits_are_nearer_to_the_model_and_take_more_bytes() -> None:
    plain = origin_of(section().model_copy(update={"adapter": "none"})).build(0)
    module, apart, sizes = origin_of(section()).build(0), [], []
    for bits in (2, 3, 4):
        chosen = (bits,) * len(bit_widths(module).names)
        set_widths(module, chosen)
        apart.append(float((logits(module) - logits(plain)).norm()))
        sizes.append(nbytes_at(module, chosen))
    assert apart == sorted(apart, reverse=True) and sizes == sorted(sizes)
    weights = sum(bit_widths(module).sizes)
    assert sizes[1] - sizes[0] == weights // 8 == sizes[2] - sizes[1]


def test_the_search_keeps_the_budget_and_finds_which_layers_need_bits() -> None:
    needs = [1.0] * 7 + [30.0] * 7

    def score(widths: tuple[int, ...]) -> float:
        return sum(n * 4.0**-b for n, b in zip(needs, widths, strict=True))

    found, value = best_widths(LAYERS, 3.0, score, count=200)
    assert LAYERS.average(found) <= 3.0 and value == score(found) < score((3,) * 14)
    assert best_widths(LAYERS, 2.0, score)[0] == (2,) * 14
    with pytest.raises(BadInput, match="at least 2 bits"):
        best_widths(LAYERS, 1.5, score)


@pytest.mark.parametrize("budget", [2.0, 2.01, 2.4, 3.7, 7.9])
def test_the_search_ends_where_no_widths_meet_the_budget_closely(budget: float) -> None:
    layers = BitWidths(("a", "b", "c"), (64, 1, 2), (2, 3, 8), 32)
    for seed in range(20):
        found, _ = best_widths(layers, budget, lambda widths: -layers.average(widths), seed=seed)
        assert layers.average(found) <= budget + 1e-9
    with pytest.raises(BadInput, match="give a budget from 2 to 8"):
        best_widths(layers, float("nan"), lambda widths: 0.0)


def test_settings_and_bases_that_are_refused() -> None:
    for given, said in (({"widths": [4]}, "two or more"), ({"widths": [1, 4]}, "2 to 8"), ({"cycle": 1}, "cycle")):
        with pytest.raises(BadInput, match=said):
            origin_of(section(**given))
    with pytest.raises(BadInput, match="an adapter that goes on a base in int8"):
        origin_of(section().model_copy(update={"base": "int8"}))


def test_training_that_needs_one_graph_is_refused() -> None:
    model = {"hf": "llama", "config": SIZES, "adapter": "qfa"}
    plan = Plan(rows=(16,), microbatches=(1,))
    assert supernet_alone(Recipe.of(RunConfig.model_validate({"model": model}), plan)) is None
    compiled = supernet_alone(Recipe.of(RunConfig.model_validate({"model": {**model, "compile": True}}), plan))
    assert compiled is not None and "model.compile true" in compiled.message
