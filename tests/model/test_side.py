"""Side networks on a module: where they start, what they keep, what they read, and what they are refused for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gossamer.model.export import export_hf, export_peft
from gossamer.model.origin import origin_of
from gossamer.model.side import attach, build, names, route_of, side_tensors
from gossamer.model.side._aggregation import Aggregation, interaction, l1_normalized, redundancy
from gossamer.model.side._tokens import TokenView
from gossamer.model.side_folder import export_side, load_side
from gossamer.model.token_logits import Recomputed, token_logits
from gossamer.partition.model_provider import OriginSource
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.start_folder import StartContent, start_state, write_start
from model.tiny import CONFIGS, VOCABULARY, Plain

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
IDS = torch.arange(24).view(2, 12) * 5 % 64
SIDES: tuple[Any, ...] = ("unipt", {"sherl": {"late": 1}})


def llama(side: Any, **more: Any) -> nn.Module:
    return origin_of(ModelSection(hf="llama", config={**CONFIG, **more}, side=side)).build(2)


def moved(module: nn.Module) -> nn.Module:
    """The module with a side network that does something."""
    torch.manual_seed(3)
    with torch.no_grad():
        for _, tensor in side_tensors(module):
            tensor.add_(0.3 * torch.randn(tensor.shape))
    return module.eval()


@torch.no_grad()
def logits(module: nn.Module, ids: Tensor = IDS, **more: Tensor) -> Tensor:
    found: Tensor = module(input_ids=ids, use_cache=False, **more).logits
    return found


def test_the_methods() -> None:
    assert names() == ("sherl", "unipt")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_starts_as_the_model_it_is_put_beside(side: Any, kind: str) -> None:
    config = CONFIGS[kind] | {"vocab_size": VOCABULARY, "n_layer" if kind == "gpt2" else "num_hidden_layers": 4}
    plain, sided = (origin_of(ModelSection(hf=kind, config=config, side=one)).build(2).eval() for one in ("none", side))
    assert torch.equal(logits(plain), logits(sided))
    assert not torch.allclose(logits(plain), logits(moved(sided)), atol=1e-3)


@pytest.mark.parametrize("side", SIDES)
def test_no_gradient_reaches_the_model(side: Any) -> None:
    module = moved(llama(side)).train()
    module.requires_grad_(True)  # also what is frozen would get one, were there a way
    module(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    with_one = {name for name, p in module.named_parameters() if p.grad is not None}
    after = {"model.norm.weight", "lm_head.weight"}
    late = {name for name, _ in module.named_parameters() if "layers.3." in name} if side != "unipt" else set()
    assert with_one == {name for name, _ in side_tensors(module)} | after | late


@pytest.mark.parametrize("side", SIDES)
def test_the_side_network_alone_is_trained(side: Any) -> None:
    module = llama(side)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in side_tensors(module)}


@pytest.mark.parametrize("side", SIDES)
def test_no_token_sees_a_later_one(side: Any) -> None:
    module = moved(llama(side))
    changed = IDS.clone()
    changed[:, 7] = 1
    before, after = logits(module), logits(module, changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-4)


def test_causal_is_the_papers_form_of_every_prefix() -> None:
    """The correction of a token is the one of the sequence that ends there, whose feature is its last token."""
    torch.manual_seed(0)
    aggregation = Aggregation([16, 16, 16], 4, guided=True, redundancy=True)
    for p in aggregation.parameters():
        nn.init.normal_(p)
    z = [torch.randn(2, 6, 4) for _ in range(3)]

    def corrected(form: str, length: int) -> Tensor:
        view = TokenView.of(form, z[0][:, :length].shape, torch.device("cpu"), None, None)
        return aggregation([one[:, :length] for one in z], view)

    whole = corrected("causal", 6)
    for length in range(1, 7):
        assert torch.allclose(corrected("last", length)[:, 0], whole[:, length - 1], atol=1e-5)


@pytest.mark.parametrize("form", ["causal", "first", "last", "mean"])
def test_padding_counts_for_nothing(form: str) -> None:
    z, out = torch.randn(1, 6, 4), torch.randn(1, 6, 4)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()
    other = z.clone()
    other[:, 4:] = 100.0
    view = TokenView.of(form, z.shape, z.device, mask, None)
    short = TokenView.of(form, z[:, :4].shape, z.device, None, None)
    found = interaction(z, view.feature(out), None, view)
    assert torch.equal(found[:, :4], interaction(other, view.feature(out), None, view)[:, :4])
    wanted = interaction(z[:, :4], short.feature(out[:, :4]), None, short)
    assert torch.allclose(found[:, :4], wanted, atol=1e-6)


def test_a_padded_batch_computes_what_its_rows_do() -> None:
    module = moved(llama("unipt"))
    mask = torch.ones_like(IDS)
    mask[1, 9:] = 0
    both = logits(module, attention_mask=mask)
    assert torch.allclose(both[1, :9], logits(module, IDS[1:, :9])[0], atol=1e-5)


@pytest.mark.parametrize("side", SIDES)
def test_packed_documents_do_not_see_each_other(side: Any) -> None:
    module = moved(llama(side, attn_implementation="sdpa"))
    route = route_of(module)
    assert route is not None
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2)
    changed = IDS.clone()
    changed[:, :5] = 3
    before, after = (logits(module, ids, position_ids=positions) for ids in (IDS, changed))
    assert torch.allclose(before[:, 5:], after[:, 5:], atol=1e-5)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(l1_normalized(torch.zeros(3, 4), dim=1), torch.zeros(3, 4))
    assert l1_normalized(torch.rand(3, 4) + 1, dim=1).sum(1).sub(1).abs().max() < 1e-5


def test_redundancy_is_at_least_1_and_2_for_a_tap_that_is_there_twice() -> None:
    features = torch.randn(5, 3, 8)
    assert redundancy(features).min() >= 1
    a, b = torch.eye(8)[0].expand(1, 3, 8), torch.eye(8)[1].expand(1, 3, 8)
    assert redundancy(torch.cat([a, b]))[0].tolist() == pytest.approx([1, 1, 1])
    twice = redundancy(torch.cat([a, a, b]))
    assert twice[:, 0].tolist() == pytest.approx([2, 2, 1])
    weights = l1_normalized(torch.ones(3) / twice[:, 0], dim=0)
    assert (weights[0] / weights[2]).item() == pytest.approx(0.5)
    assert redundancy(torch.zeros(2, 3, 8)).tolist() == [[1.0] * 3] * 2


def saved_bytes(module: nn.Module, ids: Tensor) -> int:
    """The bytes that the forward keeps for backward, parameters left out, memory that is kept twice once."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = tensor, memory.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        module(input_ids=ids, labels=ids, use_cache=False)
    return sum(size for _, size in kept.values())


def test_what_is_kept_for_backward() -> None:
    """Beyond the taps nothing grows with the model: its feedforward width and its heads do not matter."""
    narrow, wide = (llama("unipt", intermediate_size=size) for size in (64, 512))
    assert saved_bytes(narrow, IDS) == saved_bytes(wide, IDS)
    deep = {n: saved_bytes(llama("unipt", num_hidden_layers=n), IDS) for n in (4, 6, 8)}
    tap = IDS.numel() * 4 * (32 + 4)  # ReLU(h) and z, float32
    assert deep[8] - deep[6] == deep[6] - deep[4]
    assert 2 * tap <= deep[6] - deep[4] <= 2.6 * tap


def test_sherl_keeps_more_than_unipt_and_less_than_lora() -> None:
    pytest.importorskip("peft")
    lora = origin_of(ModelSection(hf="llama", config=CONFIG, adapter={"lora": {"rank": 4}})).build(2)
    unipt, sherl = (saved_bytes(llama(one), IDS) for one in SIDES)
    full = saved_bytes(llama("none"), IDS)
    assert unipt < sherl < saved_bytes(lora, IDS)
    assert unipt < full / 4


def test_it_is_the_same_for_the_same_seed_and_copied_whole() -> None:
    one, other = llama("unipt"), llama("unipt")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(side_tensors(one), side_tensors(other), strict=True))
    module = moved(one)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for _, tensor in side_tensors(copied):
            tensor.zero_()
    assert not torch.equal(logits(module), logits(copied))
    assert torch.equal(logits(copied), logits(llama("none").eval()))


class Shrinking(nn.Module):
    """Convolutions of fewer and fewer places: hidden states without tokens in common."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(pixels).mean((2, 3)))
        return found


class Net(nn.Module):
    """Convolutions and a head: hidden states (rows, channels, height, width), then (rows, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 12, 3, padding=1)
        self.flat = nn.Linear(12 * 64, 20)
        self.head = nn.Linear(20, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(pixels))))
        found: Tensor = self.head(torch.relu(self.flat(x.flatten(1))))
        return found


def test_a_plain_network_has_its_units_tapped() -> None:
    plain, sided = Net(), Net()
    sided.load_state_dict(plain.state_dict())
    attach(sided, build({"unipt": {"reduction": 2}}), seed=0)
    route = route_of(sided)
    assert route is not None and route.taps == ("first", "second", "flat")
    pixels = torch.rand(3, 1, 8, 8)
    assert torch.equal(plain(pixels), sided(pixels))
    sided(pixels).sum().backward()
    up = dict(side_tensors(sided))["side_network.aggregation.up.weight"]
    assert up.grad is not None and bool(up.grad.abs().sum() > 0)
    convolutional = Net()
    attach(convolutional, build({"unipt": {"taps": ["first", "second"], "widths": [8, 12]}}), seed=0)
    assert torch.isfinite(moved(convolutional)(pixels)).all()


def test_maps_of_other_sizes_are_averaged() -> None:
    plain = Shrinking()
    module = copy.deepcopy(plain)
    attach(module, build("unipt"), seed=0)
    route = route_of(module)
    assert route is not None and route.taps == ("body.0", "body.2", "body.3")
    pixels = torch.rand(3, 1, 16, 16)
    assert torch.equal(plain(pixels), module(pixels))
    assert not torch.allclose(plain(pixels), moved(module)(pixels), atol=1e-4)
    with pytest.raises(BadInput, match="out of turn"):
        module.forward(pixels)  # past the hooks of the model


def test_taps_of_other_tokens_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    attach(module, build({"unipt": {"tokens": "mean"}}), seed=0)
    with pytest.raises(BadInput, match="taps of the same tokens"):
        module(input_ids=IDS, decoder_input_ids=IDS[:, :5], use_cache=False)
    with pytest.raises(BadInput, match="taps of the same tokens"):
        module(input_ids=IDS, decoder_input_ids=IDS[:, :5], use_cache=False)


def test_an_encoder_is_read_at_the_token_of_its_head() -> None:
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"vocab_size": 64, "max_position_embeddings": 32}
    transformers = pytest.importorskip("transformers")
    module = transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    with pytest.raises(BadInput, match=r"no causal language model.*tokens: first"):
        attach(copy.deepcopy(module), build("unipt"), seed=0)
    sided = copy.deepcopy(module)
    attach(sided, build({"unipt": {"tokens": "first"}}), seed=0)
    module.eval(), sided.eval()
    with torch.no_grad():
        assert torch.equal(module(IDS).logits, sided(IDS).logits)
        assert not torch.allclose(module(IDS).logits, moved(sided)(IDS).logits, atol=1e-4)


def test_sampling_reads_the_whole_sequence() -> None:
    module = moved(llama("unipt"))
    found = token_logits(module)
    assert isinstance(found, Recomputed)
    assert torch.allclose(found.after([3, 5, 7]), logits(module, torch.tensor([[3, 5, 7]]))[0, -1], atol=1e-6)
    with pytest.raises(BadInput, match="use_cache=False"):
        module.generate(IDS, max_new_tokens=2)  # type: ignore[operator]
    assert module.generate(IDS, max_new_tokens=2, use_cache=False).shape == (2, 14)  # type: ignore[operator]


def test_exported_and_loaded_it_computes_the_same(tmp_path: Path) -> None:
    module = moved(llama("unipt"))
    export_side(module, "unipt", "base", tmp_path / "side")
    loaded = llama("none").eval()
    load_side(loaded, tmp_path / "side")
    assert torch.equal(logits(module), logits(loaded))
    other = llama("none")
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    with pytest.raises(BadInput, match="same model as before"):
        load_side(other, tmp_path / "side")
    with pytest.raises(BadInput, match="same model as before"):
        load_side(llama("none", num_hidden_layers=5), tmp_path / "side")
    (tmp_path / "side" / "side_network.json").write_text("[]")
    with pytest.raises(BadInput, match="gossamer export RUN --to side"):
        load_side(llama("none"), tmp_path / "side")
    with pytest.raises(BadInput, match="--to side"):
        export_hf(module, None, None, tmp_path / "merged")
    with pytest.raises(BadInput, match="--to side"):
        export_peft(module, "base", None, tmp_path / "merged")
    with pytest.raises(BadInput, match="a run with a side network"):
        export_side(llama("none"), "none", "base", tmp_path / "other")


class Normed(nn.Module):
    """Convolutions with batch norm, the last one behind the taps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(c, 8, 3), nn.BatchNorm2d(8)) for c in (1, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        for block in self.body:
            pixels = torch.relu(block(pixels))
        found: Tensor = self.head(self.norm(pixels.mean((2, 3))))
        return found


def sided(plain: nn.Module) -> nn.Module:
    module = copy.deepcopy(plain)
    attach(module, build({"unipt": {"taps": ["^body[.][01]$"], "widths": [8]}}), seed=0)
    return module


@pytest.mark.parametrize("trained", [(), ("norm.weight", "norm.bias")])
def test_norms_are_trained_or_stand_still(tmp_path: Path, trained: tuple[str, ...]) -> None:
    """A frozen model has the statistics it came with; those of a norm that is trained go along with its weights."""
    torch.manual_seed(1)
    plain = Normed().eval()
    module = moved(sided(plain)).train()
    for name in trained:
        module.get_parameter(name).requires_grad_(True)
    for _ in range(3):
        module(2 + torch.rand(6, 1, 8, 8)).sum().backward()
    changed = {name for name, one in plain.named_buffers() if not torch.equal(one, dict(module.named_buffers())[name])}
    assert changed == {f"norm.{name}" for name, _ in plain.norm.named_buffers() if trained}
    export_side(module, {"unipt": {"taps": ["^body[.][01]$"], "widths": [8]}}, "base", tmp_path / "side")
    loaded, pixels = copy.deepcopy(plain), torch.rand(3, 1, 8, 8)
    load_side(loaded, tmp_path / "side")
    assert torch.equal(loaded.eval()(pixels), module.eval()(pixels))


def test_a_failed_load_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Normed().eval()
    plain.head.requires_grad_(False)
    module = moved(sided(plain))
    module.get_parameter("head.weight").requires_grad_(True)
    with torch.no_grad():
        module.get_parameter("head.weight").add_(1)
    written = {"unipt": {"taps": ["^body[.][01]$"], "widths": [8]}}
    export_side(module, written, "base", tmp_path / "side")
    file = tmp_path / "side" / "side_network.safetensors"
    tensors = load_file(file)
    wrong = {**tensors, "side_network.aggregation.up.bias": torch.zeros(3)}
    missing = {name: one for name, one in tensors.items() if not name.endswith("up.bias")}
    target, pixels = copy.deepcopy(plain), torch.rand(3, 1, 8, 8)
    for content in (wrong, missing):
        save_file(content, file)
        with pytest.raises(BadInput, match=r"up\.bias"):
            load_side(target, tmp_path / "side")
        assert torch.equal(target(pixels), plain(pixels)) and route_of(target) is None
        same = zip(target.named_parameters(), plain.named_parameters(), strict=True)
        assert all(a == b and p.requires_grad == q.requires_grad for (a, p), (b, q) in same)
        assert not any(one._forward_hooks or one._forward_pre_hooks for one in target.modules())
    save_file(tensors, file)
    load_side(target, tmp_path / "side")
    assert torch.equal(target(pixels), module(pixels))


def test_it_goes_beside_the_model_of_a_start_folder(tmp_path: Path) -> None:
    plain = llama("none", vocab_size=64)
    tensors = {name: tensor.detach() for name, tensor in start_state(plain)}
    write_start(tmp_path / "start", StartContent(tensors=tensors, method="by_hand", source="0"))
    origin = origin_of(ModelSection(hf="llama", config=CONFIG, start=str(tmp_path / "start"), side="unipt"))
    assert torch.equal(logits(origin.build(9).eval()), logits(plain.eval()))
    part = OriginSource(origin, 9).part(frozenset({"model.norm.weight", "side_network.aggregation.up.bias"}))
    assert torch.equal(dict(part.named_parameters())["model.norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("held", ["bf16", "int8"])
def test_it_goes_beside_a_model_in_blocks(held: str) -> None:
    module = origin_of(ModelSection(hf="llama", config=CONFIG, side="unipt", base=held)).build(2)
    route = route_of(module)
    assert route is not None and route.taps == tuple(f"model.layers.{n}" for n in range(4))
    assert torch.isfinite(logits(moved(module))).all()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"side": "unipt", "adapter": "lora"}, "an adapter or a side network"),
        ({"side": "unipd"}, "did you mean 'unipt'"),
        ({"side": {"unipt": {"reduction": 0}}}, "a reduction of at least 1"),
        ({"side": {"unipt": {"tokens": "middle"}}}, "one of auto, causal"),
        ({"side": {"sherl": {"late": 0}}}, "at least 1 late block"),
        ({"side": {"sherl": {"late": 3}}}, "at least 5 repeated blocks to tap"),
        ({"side": {"unipt": {"taps": ["layrs"]}}}, "no module has 'layrs' in its path"),
        ({"side": {"unipt": {"widths": [32, 32]}}}, "one for each of the 4 taps"),
        ({"side": "unipt", "unfreeze": ["layers.0"]}, "which is before it"),
    ],
)
def test_what_is_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises((BadInput, ValueError), match=told):
        origin_of(ModelSection(hf="llama", config=CONFIG, **section)).build(0)


def test_the_head_can_be_trained_with_it() -> None:
    module = origin_of(ModelSection(hf="llama", config=CONFIG, side="unipt", unfreeze=["lm_head"])).build(0)
    assert dict(module.named_parameters())["lm_head.weight"].requires_grad
    tied = {**CONFIG, "tie_word_embeddings": True}
    with pytest.raises(BadInput, match=r"embed_tokens.weight, which is before it"):
        origin_of(ModelSection(hf="llama", config=tied, side="unipt", unfreeze=["embed"])).build(0)


def test_wrong_widths_and_ways_are_said_at_the_first_forward() -> None:
    module = Plain(dropout=0.0)
    attach(module, build({"unipt": {"widths": [8]}}), seed=0)
    with pytest.raises(BadInput, match=r"blocks.0 returns \(2, 12, 16\)"):
        module(IDS)
    twice = Plain(dropout=0.0)
    twice.blocks[1] = twice.blocks[0]  # the model calls one block in two places
    attach(twice, build({"unipt": {"taps": ["^blocks[.][0-9]$"]}}), seed=0)
    with pytest.raises(BadInput, match=r"got blocks\.0 out of turn"):
        twice(IDS)
