"""PERP's adapters on pruned layers: identity, zeros, gradients, what a layer keeps, merging, masks and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.adapter import adapt, adapter_tensors, build, merge
from gossamer.model.export import export_hf, export_peft
from gossamer.model.origin import origin_of
from gossamer.partition.model_provider import OriginSource
from gossamer.prune import apply_masks, prune
from gossamer.prune import build as pruning
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.start_folder import StartContent, start_state, write_start

pytest.importorskip("peft")
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 64},
}
IDS = torch.arange(24).view(2, 12) * 5 % 64
BOTH = ("mask_lora", "scale_lora")
Masks = dict[str, Tensor]


def pruned(folder: Path, kind: str = "llama", pattern: str = "2:4") -> tuple[ModelSection, nn.Module, Masks]:
    """A pruned model in a start folder: its section, its module, its masks."""
    section = ModelSection(hf=kind, config=SIZES[kind])
    module = origin_of(section).build(1).eval()
    masks = dict(prune(module, pruning({"magnitude": {"pattern": pattern}})).masks)
    apply_masks(module, masks)
    name = next(name for name in masks if "layers.0" in name or "h.0" in name)
    with torch.no_grad():  # a kept weight that is 0 by chance is not a pruned one
        dict(module.named_parameters())[name][masks[name].nonzero(as_tuple=True)[0][0], masks[name][0].nonzero()[0]] = 0
    tensors = {name: one.detach() for name, one in start_state(module)}
    write_start(folder, StartContent(tensors=tensors, method="magnitude", source="0", masks=masks))
    return section.model_copy(update={"start": str(folder)}), module, masks


def with_adapter(section: ModelSection, adapter: Any) -> nn.Module:
    return origin_of(section.model_copy(update={"adapter": adapter})).build(0).eval()


def trained(module: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    return module


@torch.no_grad()
def logits(module: nn.Module) -> Tensor:
    found: Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("adapter", BOTH)
def test_it_starts_as_the_pruned_model(tmp_path: Path, kind: str, adapter: str) -> None:
    section, module, _ = pruned(tmp_path / "start", kind)
    started = logits(with_adapter(section, adapter))
    assert torch.allclose(started, logits(module), atol=1e-6)
    if kind == "llama":
        assert torch.equal(started, logits(module))  # rank 16: 1 / sqrt(16) squared, 16 times, is 1


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("adapter", BOTH)
def test_zeros_stay_bit_for_bit_and_merging_changes_no_output(tmp_path: Path, kind: str, adapter: str) -> None:
    from transformers import AutoModelForCausalLM

    section, before, masks = pruned(tmp_path / "start", kind)
    module = trained(with_adapter(section, adapter))
    apart = logits(module)
    assert not torch.allclose(apart, logits(before), atol=1e-3)
    export_hf(module, origin_of(section), None, tmp_path / "whole")
    assert not [*adapter_tensors(module)]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    for found in (module, read):
        assert torch.allclose(logits(found), apart, atol=1e-6)
        params = dict(found.named_parameters())
        for name, mask in masks.items():
            zeros = params[name].detach()[~mask]
            assert torch.equal(zeros.view(torch.int32), torch.zeros_like(zeros, dtype=torch.int32)), name
            along = mask.t() if kind == "gpt2" else mask
            held = params[name].detach().t() if kind == "gpt2" else params[name].detach()
            assert int((held.reshape(-1, 4) != 0).sum(1).max()) <= 2 == int(along.reshape(-1, 4).sum(1).min())
            assert not torch.equal(params[name], dict(before.named_parameters())[name])


def test_the_explicit_mask_tells_a_pruned_weight_from_one_that_is_zero(tmp_path: Path) -> None:
    section, before, masks = pruned(tmp_path / "start")
    params = dict(before.named_parameters())
    by_chance = {name: (params[name] == 0) & mask for name, mask in masks.items()}
    assert sum(int(one.sum()) for one in by_chance.values()) == 1
    for mask, moves in (("start", True), ("nonzero", False)):
        module = trained(with_adapter(section, {"mask_lora": {"mask": mask}}))
        merge(module)
        after = dict(module.named_parameters())
        assert all(bool((after[name][at] != 0).all()) == moves for name, at in by_chance.items() if bool(at.any()))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("adapter", BOTH)
def test_gradients_are_those_of_autograd(adapter: str, turned: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    inner: nn.Module = Conv1D(6, 8) if turned else nn.Linear(8, 6)
    holder = nn.ModuleList([inner, nn.Linear(6, 6)]).double()
    weight: Tensor = inner.weight.detach().clone()  # type: ignore[assignment,operator]
    mask = torch.rand(weight.shape) > 0.5
    weight = weight * mask
    inner.weight.data = weight.clone()  # type: ignore[union-attr]
    adapt(holder, build({adapter: {"rank": 4, "targets": ["^0$"]}}), 0)
    layer: Any = holder[0].double()
    layer.mask = mask
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    with torch.no_grad():
        a.add_(torch.randn(a.shape)), b.add_(torch.randn(b.shape))
    layer.base_layer.bias.requires_grad_(True)
    x = torch.randn(3, 5, 8, dtype=torch.double, requires_grad=True)
    inputs = (x, a, b, layer.base_layer.bias)
    p = (b @ a).t() if turned else b @ a
    whole = weight + 32 / 4 * p * mask if adapter == "mask_lora" else weight * p
    wanted = x @ (whole if turned else whole.t()) + layer.base_layer.bias
    found = layer(x)
    assert torch.allclose(found, wanted)
    dy = torch.randn(found.shape, dtype=torch.double)
    for one, other in zip(torch.autograd.grad(found, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        assert torch.allclose(one, other)
    assert torch.autograd.gradcheck(lambda *_: layer(x), inputs[:3])


@pytest.mark.parametrize("adapter", BOTH)
def test_a_layer_keeps_its_input_and_two_thin_matrices(adapter: str) -> None:
    wide, rank, tokens = 64, 4, 512
    holder = nn.ModuleList([nn.Linear(wide, 48), nn.Linear(48, 48)])
    adapt(holder, build({adapter: {"rank": rank, "targets": ["^0$"]}}), 0)
    layer: Any = holder[0]
    layer.mask = torch.rand(48, wide) > 0.5
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    x = torch.randn(tokens, wide, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert sum(one.nbytes for one in kept.values()) == 4 * (tokens * wide + rank * (wide + 48))


def test_the_rank_of_scale_lora_is_one(tmp_path: Path) -> None:
    """What its docstring says: rows of A stay equal, and rank 1 at sqrt(rank) times the rate is the same with Adam."""
    section, before, _ = pruned(tmp_path / "start")
    made = {}
    for rank, rate in ((16, 1e-2), (1, 4e-2)):
        module = with_adapter(section, {"scale_lora": {"rank": rank}})
        optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=rate, eps=1e-20)
        for _ in range(3):
            optimizer.zero_grad()
            module(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
        for one in adapter_tensors(module):
            rows = one.tensor if one.slot == "lora_A" else one.tensor.t()
            assert torch.allclose(rows, rows[:1].expand_as(rows), rtol=1e-4)
        made[rank] = logits(module)
    assert torch.allclose(made[16], made[1], atol=2e-3)
    assert float((made[1] - logits(before)).abs().max()) > 0.1


def test_biases_and_norms_alone_leave_the_weights(tmp_path: Path) -> None:
    section, before, masks = pruned(tmp_path / "start", "gpt2")
    chosen = section.model_copy(update={"freeze": ["."], "unfreeze": [r"\.bias$", r"ln_"]})
    module = trained(origin_of(chosen).build(0).eval())
    params, old = dict(module.named_parameters()), dict(before.named_parameters())
    moved = {name for name, one in params.items() if not torch.equal(one, old[name])}
    assert moved and all(name.endswith("bias") or "ln_" in name for name in moved)
    assert not moved & masks.keys()


def test_an_adapter_with_biases_and_norms(tmp_path: Path) -> None:
    section, _, masks = pruned(tmp_path / "start", "gpt2")
    chosen = section.model_copy(update={"adapter": "mask_lora", "unfreeze": [r"\.bias$", r"ln_"]})
    module = trained(origin_of(chosen).build(0).eval())
    before = logits(module)
    merge(module)
    assert torch.allclose(logits(module), before, atol=1e-6)
    params = dict(module.named_parameters())
    assert not any(bool(params[name][~mask].count_nonzero()) for name, mask in masks.items())


@pytest.mark.parametrize("adapter", ["mask_lora", {"mask_lora": {"mask": "nonzero"}}, "scale_lora"])
def test_a_part_has_the_values_of_the_whole(tmp_path: Path, adapter: Any) -> None:
    section, _, _ = pruned(tmp_path / "start")
    origin = origin_of(section.model_copy(update={"adapter": adapter}))
    whole = origin.build(5)
    holds = frozenset(name for name, _ in whole.named_parameters() if "layers.1." in name)
    part = OriginSource(origin, 5).part(holds)
    found, wanted = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (part, whole))
    masks = {name for name, _ in whole.named_buffers() if name.endswith("mask") and "layers.1." in name}
    assert all(torch.equal(found[name], wanted[name]) for name in holds | masks)
    assert len(masks) == (0 if adapter == "scale_lora" else 7)


def test_half_precision_merges_what_it_computed(tmp_path: Path) -> None:
    section, _, masks = pruned(tmp_path / "start")
    module = with_adapter(section.model_copy(update={"dtype": "bfloat16"}), "mask_lora")
    with torch.no_grad():
        for one in adapter_tensors(module):
            one.tensor.add_(0.05 * torch.randn(one.tensor.shape))
    before = logits(module)
    merge(module)
    assert torch.equal(logits(module), before)
    params = dict(module.named_parameters())
    assert not any(bool(params[name][~mask].count_nonzero()) for name, mask in masks.items())


@pytest.mark.parametrize("adapter", BOTH)
def test_a_peft_folder_would_compute_otherwise_and_is_refused(tmp_path: Path, adapter: str) -> None:
    section, _, _ = pruned(tmp_path / "start")
    origin = origin_of(ModelSection(hf=str(tmp_path / "base"), start=section.start, adapter=adapter))
    with pytest.raises(BadInput, match=r"another way than peft.*export it merged with --to hf"):
        export_peft(with_adapter(section, adapter), "base", None, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    assert origin is not None


def test_masks_that_are_missing_or_of_another_model_are_refused(tmp_path: Path) -> None:
    section, module, masks = pruned(tmp_path / "start")
    plain = section.model_copy(update={"start": None})
    with pytest.raises(BadInput, match=r"set model\.start to one, or mask: nonzero"):
        with_adapter(plain, "mask_lora")
    with pytest.raises(BadInput, match="wanted weights of 0"):
        with_adapter(plain, {"mask_lora": {"mask": "nonzero"}})
    tensors = {name: one.detach() for name, one in start_state(module)}
    turned = {name: ~mask for name, mask in masks.items()}
    for place, held, said in (
        ("none", {}, "none in"),
        ("turned", turned, "with weights that the mask says are 0"),
        ("elsewhere", {"model.norm.weight": torch.ones(32)}, "without a mask"),
        ("shape", {name: mask[:, :16] for name, mask in masks.items()}, r"of shape \(32, 16\), where it has"),
    ):
        write_start(tmp_path / place, StartContent(tensors=tensors, method="m", source="0", masks=held))
        with pytest.raises(BadInput, match=said):
            with_adapter(plain.model_copy(update={"start": str(tmp_path / place)}), "mask_lora")


def test_a_weight_that_is_trained_under_the_adapter_is_refused(tmp_path: Path) -> None:
    section, _, _ = pruned(tmp_path / "start")
    module = origin_of(section.model_copy(update={"adapter": "mask_lora", "unfreeze": ["q_proj.weight"]})).build(0)
    with pytest.raises(BadInput, match=r"model\.unfreeze: wanted frozen weights"):
        logits(module)


def test_scales_start_at_one() -> None:
    for rank in (1, 3, 16):
        holder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        adapt(holder, build({"scale_lora": {"rank": rank}}), 0)
        assert all(torch.allclose(one.tensor, torch.tensor(1 / math.sqrt(rank))) for one in adapter_tensors(holder))
