"""Adapters on a module: names, initial values, targets, merging, and what a layer keeps for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.adapter import REGISTRY, adapt, adapter_tensors, build, merge, names
from gossamer.model.export import export_hf, export_peft
from gossamer.model.origin import origin_of
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput

peft = pytest.importorskip("peft")
PEFT = [one for one in names() if not (REGISTRY.type(one).replaces_layers or REGISTRY.type(one).keeps_masks)]
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
UNMASKED = [one for one in names() if not REGISTRY.type(one).keeps_masks]  # the others: test_perp.py
IDS = torch.arange(24).view(2, 12) * 5 % 64


def section(adapter: Any, **more: Any) -> ModelSection:
    return ModelSection(hf="llama", config=CONFIG, adapter=adapter, **more)


def moved(module: nn.Module) -> nn.Module:
    """The module with an adapter that does something."""
    torch.manual_seed(3)
    with torch.no_grad():
        for one in adapter_tensors(module):
            one.tensor.add_(0.1 * torch.randn(one.tensor.shape))
    return module.eval()


@torch.no_grad()
def logits(module: nn.Module) -> Tensor:
    found: Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("adapter", PEFT)
def test_it_starts_as_the_model_it_is_put_on(adapter: str) -> None:
    plain, adapted = (origin_of(section(one)).build(2).eval() for one in ("none", adapter))
    assert torch.allclose(logits(plain), logits(adapted), atol=1e-6)
    assert not torch.allclose(logits(plain), logits(moved(adapted)), atol=1e-3)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained and trained <= {one.name for one in adapter_tensors(adapted)}


@pytest.mark.parametrize("adapter", PEFT)
def test_names_are_those_of_the_model_and_of_slots(adapter: str) -> None:
    plain, adapted = (origin_of(section(one)).build(2) for one in ("none", adapter))
    found = {name: tuple(p.shape) for name, p in adapted.named_parameters()}
    assert all(found[name] == tuple(p.shape) for name, p in plain.named_parameters())
    assert not any("base_layer" in name or "default" in name for name in found)


@pytest.mark.parametrize(
    "adapter",
    [pytest.param(one, marks=[pytest.mark.nightly] if one in ("rslora", "lora_fa", "ia3") else []) for one in UNMASKED],
)
def test_a_part_has_the_values_of_the_whole(adapter: str, tmp_path: Path) -> None:
    origin_of(section("none")).build(1).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    for of in (section(adapter), ModelSection(hf=str(tmp_path / "base"), adapter=adapter)):
        origin = origin_of(of)
        whole = dict(origin.build(5).named_parameters())
        holds = frozenset(name for name in whole if "layers.1." in name)
        part = dict(OriginSource(origin, 5).part(holds).named_parameters())
        assert all(torch.equal(part[name], whole[name]) for name in holds)


@pytest.mark.parametrize("adapter", PEFT)
def test_merged_and_exported_it_computes_the_same(adapter: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    origin_of(section("none")).build(1).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    origin = origin_of(ModelSection(hf=str(tmp_path / "base"), adapter=adapter))
    module = moved(origin.build(0))
    wanted = logits(module)
    said = export_peft(module, str(tmp_path / "base"), origin, tmp_path / "peft")
    assert f"from_pretrained({str(tmp_path / 'base')!r})" in said
    of_file = export_peft(module, str(tmp_path / "base.gguf"), origin, tmp_path / "peft of a file")
    assert f"from_pretrained({str(tmp_path)!r}, gguf_file='base.gguf')" in of_file
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "peft")
    assert torch.allclose(logits(read.eval()), wanted, atol=1e-6)
    export_hf(module, origin, None, tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert torch.allclose(logits(whole), wanted, atol=1e-5)
    assert not [*adapter_tensors(module)]


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapted_head_that_is_tied_is_merged_without_the_embedding(adapter: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = str(tmp_path / "base")
    tied = ModelSection(hf="llama", config={**CONFIG, "tie_word_embeddings": True})
    origin_of(tied).build(1).save_pretrained(base)  # type: ignore[operator]
    origin = origin_of(ModelSection(hf=base, adapter={adapter: {"targets": ["lm_head", "q_proj"]}}))
    module = moved(origin.build(0))
    wanted, embedding = logits(module), module.get_input_embeddings().weight.clone()  # type: ignore[operator]
    export_peft(module, base, origin, tmp_path / "peft")
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft")
    assert torch.allclose(logits(read.eval()), wanted, atol=1e-6)
    export_hf(module, origin, None, tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(whole.get_input_embeddings().weight, embedding)
    assert torch.allclose(logits(whole), wanted, atol=1e-5)


def test_a_peft_folder_holds_what_was_trained_beside_the_adapter(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = str(tmp_path / "base")
    origin_of(section("none")).build(1).save_pretrained(base)  # type: ignore[operator]
    origin = origin_of(ModelSection(hf=base, adapter="lora", unfreeze=["norm", "embed_tokens"]))
    module = moved(origin.build(0))
    with torch.no_grad():
        for name, one in module.named_parameters():
            if "norm" in name or "embed" in name:
                one.add_(0.3 * torch.randn(one.shape))
    export_peft(module, base, origin, tmp_path / "peft")
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft")
    assert torch.allclose(logits(read.eval()), logits(module), atol=1e-6)


@pytest.mark.parametrize(("unfreeze", "why"), [("q_proj.weight", "adapted too"), ("embed", "tied to another one")])
def test_a_peft_folder_without_all_that_was_trained_is_refused(tmp_path: Path, unfreeze: str, why: str) -> None:
    of = ModelSection(hf="llama", config={**CONFIG, "tie_word_embeddings": True}, adapter="lora", unfreeze=[unfreeze])
    with pytest.raises(BadInput, match=f"which is {why}: export with --to hf"):
        export_peft(origin_of(of).build(0), "base", None, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_initial_values_follow_from_seed_and_name() -> None:
    one, same, other = (origin_of(section("lora", unfreeze=[])).build(seed) for seed in (1, 1, 2))
    drawn = [{t.name: t.tensor for t in adapter_tensors(m) if t.slot == "lora_A"} for m in (one, same, other)]
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not any(torch.equal(drawn[0][name], drawn[2][name]) for name in drawn[0])
    assert len({float(tensor.detach().sum()) for tensor in drawn[0].values()}) == len(drawn[0])
    bound = 32**-0.5
    inner = drawn[0]["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert 0.9 * bound < float(inner.abs().max()) <= bound


class Recorded:
    """The bytes that autograd keeps for a backward pass, without those of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.params = {p.data_ptr() for p in module.parameters()}
        self.kept: dict[int, int] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.params:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    @property
    def total(self) -> int:
        return sum(self.kept.values())


class Three(nn.Module):
    """Three linear layers of one input, as queries, keys and values are."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum()


@pytest.mark.parametrize(
    ("adapter", "wanted"),
    [("lora", 512 * 256 * 4 + 3 * 512 * 8 * 4), ("lora_fa", 3 * 512 * 8 * 4)],  # card A1: 524,288 + 3 x 16,384
)
def test_lora_fa_keeps_no_input(adapter: str, wanted: int) -> None:
    module = Three()
    adapt(module, build({adapter: {"rank": 8}}), 0)
    recorded = Recorded(module)
    x = torch.randn(512, 256, requires_grad=False)
    with torch.autograd.graph.saved_tensors_hooks(recorded, lambda tensor: tensor):
        module(x)
    assert recorded.total == wanted


def test_lora_fa_moves_b_alone_and_by_the_projected_gradient() -> None:
    """With orthonormal rows of A, W moves by a multiple of G A^T A: its gradient's part in A's row space."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 16, bias=False))
    adapt(module, build({"lora_fa": {"rank": 4, "alpha": 8}}), 0)
    of = {one.slot: one for one in adapter_tensors(module)}
    a, b = of["lora_A"].tensor, of["lora_B"].tensor
    assert torch.allclose(a @ a.T, torch.eye(4), atol=1e-6)
    assert not a.requires_grad and b.requires_grad
    x, target, before = torch.randn(5, 24), torch.randn(5, 16), a.clone()
    (module(x) - target).square().sum().backward()
    weight = of["lora_A"].layer.get_base_layer().weight
    gradient = 2 * (x @ weight.T - target).T @ x
    assert b.grad is not None
    moved_by = (8 / 4) * b.grad @ a  # of W, when B moves by its gradient
    assert torch.allclose(moved_by, (8 / 4) ** 2 * gradient @ a.T @ a, rtol=1e-4, atol=1e-4)
    assert torch.equal(a, before)


def test_targets_are_named_by_pattern() -> None:
    module = origin_of(section({"lora": {"rank": 2, "targets": ["[qv]_proj"]}})).build(0)
    layers = {one.name.partition(".lora_")[0].rpartition(".")[2] for one in adapter_tensors(module)}
    assert layers == {"q_proj", "v_proj"}
    every = origin_of(section("lora")).build(0)
    assert not any("lm_head" in one.name for one in adapter_tensors(every))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"adapter": {"lora": {"targets": ["q_porj"]}}},
            "no linear layer of this LlamaForCausalLM is called 'q_porj'.*q_proj",
        ),
        ({"adapter": {"lora": {"targets": ["("]}}}, "is no regular expression"),
        ({"adapter": {"lora": {"rank": 0}}}, "wanted a rank of at least 1, got 0"),
        ({"adapter": "lorra"}, "no adapter is called 'lorra'.*lora"),
        ({"adapter": "lora", "unfreeze": ["nrom"]}, "no parameter has 'nrom' in its name"),
        ({"adapter": "none", "freeze": ["."]}, "wanted at least one parameter to train"),
    ],
)
def test_bad_input_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        origin_of(section(given.pop("adapter"), **given)).build(0)


def test_parameters_are_frozen_and_trained_by_pattern() -> None:
    module = origin_of(section("lora", unfreeze=["norm"])).build(0)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert "model.norm.weight" in trained and any("lora_B" in name for name in trained)
    module = origin_of(section("none", freeze=["embed_tokens"])).build(0)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


class Proj(nn.Module):
    """Layers of which the name of one is the end of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.ModuleDict({"proj": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner["proj"](torch.tanh(self.k_proj(torch.tanh(self.proj(x)))))
        return found


@pytest.mark.parametrize("adapter", PEFT)
def test_a_pattern_adapts_the_layers_it_finds_and_no_other(adapter: str) -> None:
    module = Proj()
    given: dict[str, Any] = {"targets": ["^proj$"]} | ({"feedforward": ["^proj$"]} if adapter == "ia3" else {})
    adapt(module, build({adapter: given}), 0)
    assert {one.name.partition(".")[0] for one in adapter_tensors(module)} == {"proj"}
    both: dict[str, Any] = {"targets": ["proj$"]} | ({"feedforward": ["^proj$"]} if adapter == "ia3" else {})
    module = Proj()
    adapt(module, build({adapter: both}), 0)
    x = torch.randn(4, 8)
    wanted = moved(module)(x)
    merge(module)
    assert torch.allclose(module(x), wanted, atol=1e-5)


class Attended(nn.Module):
    """torch's own blocks, which read weights of layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("adapter", ["lora", "dora", "vera"])
def test_an_adapter_acts_wherever_it_is_put_in_training_and_in_evaluation(adapter: str) -> None:
    module = Attended()
    adapt(module, build(adapter), 0)
    moved(module).train()
    x = torch.randn(2, 5, 8)
    trained = module(x)
    trained.square().sum().backward()
    with torch.no_grad():
        evaluated = module.eval()(x)
    tensors = [one for one in adapter_tensors(module) if one.tensor.requires_grad]
    assert tensors and all(one.tensor.grad is not None for one in tensors)
    assert torch.allclose(trained, evaluated, atol=1e-5)
    with pytest.raises(BadInput, match=r"out_proj, of which nn\.MultiheadAttention reads the weight alone"):
        adapt(Attended(), build({adapter: {"targets": ["out_proj"]}}), 0)


def test_a_layer_in_two_places_is_refused_and_a_block_used_twice_is_adapted_once() -> None:
    layer, block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(BadInput, match="wanted layers that stand in one place each, to adapt, got 0, which is 2 too"):
        adapt(nn.Sequential(layer, nn.Tanh(), layer), build("lora"), 0)
    module, x = nn.Sequential(block, block), torch.randn(4, 8)
    adapt(module, build("lora"), 0)
    wanted = moved(module)(x)
    merge(module)
    assert torch.allclose(module(x), wanted, atol=1e-5)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_that_is_not_linear_after_all_is_not_merged() -> None:
    module = nn.Sequential(Doubled(8, 8))
    adapt(module, build("lora"), 0)
    with pytest.raises(BadInput, match="Doubled, which computes otherwise than a linear layer: its adapter cannot be"):
        merge(module)


@pytest.mark.parametrize(
    ("module", "said"),
    [(nn.Linear(8, 8), "none inside of a Linear"), (nn.Sequential(nn.ReLU()), "none inside of a Sequential")],
)
def test_a_model_without_layers_to_adapt_is_refused(module: nn.Module, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        adapt(module, build("lora"), 0)


def test_layers_that_peft_refuses_are_bad_input() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 64}
    with pytest.raises(BadInput, match=r"peft refuses these layers .*out_proj.*: name others with targets"):
        origin_of(ModelSection(hf="mamba", config=sizes, adapter="lora")).build(0)


def test_a_peft_folder_on_a_base_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    origin = origin_of(section("lora", unfreeze=["norm"]))
    with pytest.raises(BadInput, match=r"wanted an adapter on a base that peft can read, got one on llama.*random"):
        export_peft(origin.build(0), "llama", origin, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_a_peft_folder_of_a_model_of_ones_own_says_how_it_is_loaded(tmp_path: Path) -> None:
    origin = origin_of(ModelSection(factory="model.tiny:Plain", config={"width": 8}, adapter="lora"))
    said = export_peft(origin.build(0), "model.tiny:Plain", origin, tmp_path / "peft")
    folder = str(tmp_path / "peft")
    assert said == f"from model.tiny import Plain; peft.PeftModel.from_pretrained(Plain(width=8), {folder!r})"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2 has Conv1D, whose weight lies turned
def test_an_adapter_on_a_base_in_blocks_is_merged_into_layers_of_the_kind_that_they_were(kind: str) -> None:
    config = {"llama": CONFIG, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}}[kind]
    module = moved(origin_of(ModelSection(hf=kind, config=config, base="int8", adapter="lora")).build(0))
    expected = logits(module)
    merge(module)
    assert torch.allclose(logits(module), expected, atol=1e-5)
    plain = origin_of(ModelSection(hf=kind, config=config)).build(0).state_dict()
    assert {n: t.shape for n, t in module.state_dict().items()} == {n: t.shape for n, t in plain.items()}


def test_merging_leaves_a_model_without_adapter_as_it_is() -> None:
    module = origin_of(section("none")).build(0)
    before = {name: p.clone() for name, p in module.named_parameters()}
    merge(module)
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())


def test_kinds_that_need_the_matrix_refuse_a_base_in_blocks() -> None:
    said = "wanted an adapter that goes on a base in int8: lora, lora_fa, rslora, got dora"
    with pytest.raises(BadInput, match=said):
        origin_of(section("dora", base="int8"))
    with pytest.raises(BadInput, match="wanted a GGUF file"):
        origin_of(section("lora", base="gguf")).build(0)
    with pytest.raises(ValueError, match="wanted an adapter on a base in int8"):
        section("none", base="int8")
