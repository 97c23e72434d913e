"""Every pruning: exact sparsity, patterns, layers found by structure, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.adapter import adapt
from gossamer.model.adapter import build as adapter
from gossamer.model.quantize_base import quantize_base
from gossamer.prune import Pruning, apply_masks, build, names, prune
from gossamer.spec.errors import BadInput
from model.tiny import CONFIGS, VOCABULARY, Plain, batch
from prune.experts import FUSED, MixtureModel, ids, of_transformers


def forwards(module: nn.Module, rows: Tensor | None = None) -> list[Any]:
    return [lambda part=part: module(part) for part in (ids() if rows is None else rows).split(2)]


def language_model(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    module: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=VOCABULARY, **CONFIGS[kind])
    )
    return module.eval()


def dense() -> list[str]:
    return [name for name in names() if not build(name).weighs_by_gate]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_each_row_of_each_matrix_has_the_sparsity(name: str, sparsity: float) -> None:
    torch.manual_seed(0)
    module = MixtureModel()
    found = prune(module, build({name: {"sparsity": sparsity}}), forwards(module))
    assert {one.name for one in found.matrices} == {
        f"blocks.{block}.{path}"
        for block in range(2)
        for path in ("mix", *(f"moe.experts.{n}.{part}" for n in range(4) for part in ("up", "down")))
    }
    for mask in found.masks.values():
        assert mask.dtype == torch.bool
        assert set((~mask).sum(1).tolist()) == {int(sparsity * mask.shape[1] + 1e-9)}
    assert dict(found.left_out) == {f"blocks.{block}.moe.router": "a router" for block in range(2)}


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_patterns_hold_along_the_inputs_of_every_expert(name: str, kind: str, pattern: str) -> None:
    module = of_transformers(kind)
    found = prune(module, build({name: {"pattern": pattern}}), forwards(module))
    few, many = map(int, pattern.split(":"))
    fused = {one.parameter for one in found.matrices if "experts" in one.parameter}
    assert len(fused) == 4 and len(found.matrices) >= 2 * (2 * 4 + 4)
    for parameter, mask in found.masks.items():
        rows = mask.transpose(-1, -2) if kind == "gpt_oss" and parameter in fused else mask
        assert torch.equal(rows.reshape(-1, many).sum(1), torch.full((mask.numel() // many,), few))
    assert found.sparsity == pytest.approx(0.5)
    before = {n: p.clone() for n, p in module.named_parameters()}
    apply_masks(module, found.masks)
    for parameter, value in module.named_parameters():
        mask = found.masks.get(parameter, torch.ones_like(value, dtype=torch.bool))
        assert torch.equal(value, torch.where(mask, before[parameter], 0.0))
    assert not any(any(end in one for end in ("embed", "lm_head", "norm", "router", ".gate.")) for one in found.masks)


@pytest.mark.parametrize("name", dense())
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_of_language_models(name: str, kind: str) -> None:
    module = language_model(kind)
    rows = batch(4)["input_ids"]
    found = prune(module, build({name: {"sparsity": 0.5}}), forwards(module, rows))
    assert len(found.masks) == (2 * 7 if kind == "llama" else 2 * 4)
    assert not any("embed" in one or "head" in one or "wte" in one for one in found.masks)
    along = 0 if kind == "gpt2" else 1  # Conv1D holds (in, out)
    assert all(bool((mask.sum(along) * 2 == mask.shape[along]).all()) for mask in found.masks.values())


@pytest.mark.parametrize("name", dense())
def test_subclasses_and_layers_beside_them(name: str) -> None:
    class Named(nn.Linear):
        pass

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), Named(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
            return found

    module, x = nn.Sequential(Attending(), Attending()), torch.randn(2, 3, 8)
    found = prune(module, build(name), [lambda: module(x)])
    assert sorted(found.masks) == ["0.out.weight", "1.out.weight"]


class ByName(nn.Module):
    """A kernel along time and a bilinear form, whose parameters have three dimensions, and a layer called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.mix, self.scale = (
            nn.Conv1d(8, 8, 3, padding=1, groups=8),
            nn.Linear(8, 8),
            nn.Bilinear(8, 8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.along(x.transpose(1, 2)).transpose(1, 2)
        found: Tensor = self.scale(x, self.mix(input=h))
        return found


@pytest.mark.parametrize("name", dense())
def test_kernels_are_no_experts_and_inputs_may_be_given_by_name(name: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(ByName(), ByName()), torch.randn(2, 3, 8)
    found = prune(module, build(name), [lambda: module(x)])
    assert sorted(found.masks) == ["0.mix.weight", "1.mix.weight"] and not any(one.fell_back for one in found.matrices)
    if name == "wanda":
        with torch.no_grad():
            seen = module[0].along(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[operator, union-attr]
        scores = module[0].mix.weight.abs() * seen.flatten(0, 1).norm(dim=0)  # type: ignore[operator, union-attr]
        assert torch.equal(found.masks["0.mix.weight"], scores >= scores.sort(1).values[:, 4:5])


def test_patterns_choose_layers() -> None:
    module = MixtureModel()
    some = prune(module, build({"magnitude": {"include": ["experts", "head"], "exclude": ["0\\.up"]}}))
    chosen = {one.name for one in some.matrices}
    assert "head" in chosen and not any("mix" in one or one.endswith("0.up") for one in chosen)
    assert ("blocks.0.moe.experts.0.up", "excluded") in some.left_out
    assert "blocks.0.moe.router" in {
        one.name for one in prune(module, build({"magnitude": {"include": ["router"]}})).matrices
    }


def test_equal_scores_and_order_of_layers_are_settled() -> None:
    module = nn.Linear(8, 2)
    nn.init.ones_(module.weight)
    mask = prune(module, build({"magnitude": {"sparsity": 0.5}})).masks["weight"]
    assert mask.tolist() == [[False] * 4 + [True] * 4] * 2


def test_a_layer_that_is_called_in_two_places_has_one_mask() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([shared, shared])

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.blocks[1](self.blocks[0](x))
            return found

    module, x = Twice(), torch.randn(3, 8)
    found = prune(module, build("wanda"), [lambda: module(x)])
    assert [one.tokens for one in found.matrices] == [6] and list(found.masks) == ["blocks.0.weight"]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sparsity": 0.0}, "above 0 and below 1"),
        ({"sparsity": 1.0}, "above 0 and below 1"),
        ({"sparsity": float("nan")}, "above 0 and below 1"),
        ({"sparsity": 0.5, "pattern": "2:4"}, "leave one out"),
        ({"pattern": "4:2"}, "0 < n < m"),
        ({"pattern": "half"}, "0 < n < m"),
    ],
)
def test_settings_that_are_refused(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        build({name: given})


def with_adapter() -> nn.Module:
    pytest.importorskip("peft")
    module = language_model("llama")
    adapt(module, adapter("lora"), 0)
    return module


def quantized() -> nn.Module:
    module = language_model("llama")
    quantize_base(module, "int8")
    return module


class Unknown(nn.Module):
    """Experts in one parameter, used in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.weight.sum(0)


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


def with_nan() -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.init.constant_(module[1].weight, float("nan"))
    return module


@pytest.mark.parametrize(
    ("make", "written", "said"),
    [
        (lambda: nn.Embedding(4, 4), {"magnitude": {}}, "a model with linear layers"),
        (with_adapter, {"magnitude": {}}, "one with an adapter: export it merged"),
        (quantized, {"magnitude": {}}, "one with layers in quantized blocks: export it merged"),
        (lambda: nn.Linear(6, 4), {"magnitude": {"pattern": "2:4"}}, "6 weights a row"),
        (MixtureModel, {"magnitude": {"include": ["rooter"]}}, "did you mean 'router'"),
        (MixtureModel, {"magnitude": {"exclude": ["("]}}, "no regular expression"),
        (MixtureModel, {"magnitude": {"exclude": ["."]}}, "layers to prune"),
        (MixtureModel, {"wanda": {}}, "name text files"),
        (lambda: Plain(), {"moe_pruner": {}}, "choose wanda"),
        (Unknown, {"magnitude": {}}, "weight, a parameter with three dimensions of a .*Unknown"),
        (parametrized, {"magnitude": {}}, "0, whose weight is computed"),
        (with_nan, {"magnitude": {}}, "finite weights and inputs, got others in 1"),
        (lambda: Plain(), {"magnitude": {"include": ["head", "mix"]}}, None),
    ],
)
def test_what_cannot_be_pruned_is_named(make: Any, written: dict[str, Any], said: str | None) -> None:
    module = make()
    if said is None:
        assert "embed.weight" in prune(module, build(written)).masks  # asked for by name
        return
    with pytest.raises(BadInput, match=said):
        prune(module, build(written))


def test_what_is_not_observed_can_be_excluded() -> None:
    assert list(prune(Unknown(), build({"magnitude": {"exclude": ["^$"]}})).masks) == ["first.weight"]


def test_masks_of_another_model_are_refused() -> None:
    masks = prune(nn.Sequential(nn.Linear(8, 8)), build("magnitude")).masks
    for other, said in ((nn.Linear(8, 8), "0.weight, which this Linear"), (nn.Sequential(nn.Linear(8, 4)), "shape")):
        with pytest.raises(BadInput, match=said):
            apply_masks(other, masks)


def test_it_changes_nothing_but_what_masks_say() -> None:
    module = MixtureModel()
    state = {name: one.clone() for name, one in module.state_dict().items()}
    hooks = [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules()]
    pruning: Pruning = build("moe_pruner")
    prune(module, pruning, forwards(module))
    assert all(torch.equal(one, state[name]) for name, one in module.state_dict().items())
    assert hooks == [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in module.modules()]
    assert torch.is_grad_enabled()
