"""`gossamer grow` from its inputs to its start folder: runs with moments, folders of transformers, own modules."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import gossamer
from gossamer import grow
from gossamer.api import verbs
from gossamer.cli.grow import _told
from gossamer.model.adapter import adapt
from gossamer.model.adapter import build as adapter
from gossamer.model.export import export_hf
from gossamer.model.origin import origin_of
from gossamer.model.quantize_base import quantize_base
from gossamer.settings import load
from gossamer.spec.config import ModelSection
from gossamer.spec.errors import BadInput
from gossamer.store.checkpoint import list_checkpoints, open_checkpoint
from gossamer.store.start_folder import MOMENTS, StartFolder
from grow.grow_models import LLAMA, gpt2, llama, logits, qwen3, spread_out

LARGE = {**LLAMA, "hidden_size": 40, "intermediate_size": 85, "num_hidden_layers": 3, "num_key_value_heads": 4}
LARGE |= {"num_attention_heads": 8, "vocab_size": 50}


def written(folder: Path, model: dict[str, Any], **train: Any) -> Path:
    file = folder / "large.yaml"
    sections = {"model": model, "train": {"steps": 100, "batch": 8, **train}, "data": {"sequence": 32}}
    file.write_text(yaml.safe_dump(sections))
    return file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    export_hf(spread_out(llama()), None, None, tmp_path / "small")
    return tmp_path / "small"


def test_a_folder_of_transformers_is_grown_and_loads_there(small: Path, tmp_path: Path) -> None:
    """The epsilon is in the folder and in the model that a run builds: both compute what the small one did."""
    from transformers import AutoModelForCausalLM

    config = written(tmp_path, {"hf": "llama", "config": LARGE})
    data = verbs.grow(small, config, out=tmp_path / "out")
    assert data["logit_difference"] < 1e-12 and data["proved_in"] == "float64"
    assert data["logit_difference_as_stored"] < 1e-5
    assert "model.start=" in data["next"] and "warmup=30" in data["next"]
    expected = logits(AutoModelForCausalLM.from_pretrained(small))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rms_norm_eps == pytest.approx(1e-6 * 24 / 40)
    assert float((logits(loaded) - expected).abs().max()) < 1e-5
    section = ModelSection(hf="llama", config=LARGE, start=str(tmp_path / "out"))
    origin = origin_of(section)
    built = origin.build(0)
    assert built.model.norm.variance_epsilon == pytest.approx(1e-6 * 24 / 40)
    assert float((logits(built) - expected).abs().max()) < 1e-5
    kept = origin.kept()["config.json"]
    assert isinstance(kept, bytes) and json.loads(kept)["rms_norm_eps"] == pytest.approx(1e-6 * 24 / 40)


def test_a_module_of_ones_own_gets_its_epsilon_by_attribute(tmp_path: Path) -> None:
    from grow.grow_factory import plain

    torch.manual_seed(0)
    config = written(tmp_path, {"factory": "grow.grow_factory:plain", "config": {"width": 40, "layers": 3}})
    from gossamer import grow
    from gossamer.job.growth import GrowthSource, grown_between

    source = spread_out(plain()).eval()
    target = plain(40, 3)
    found = grown_between(GrowthSource(module=source, place="here"), target, grow.build("lemon"), load(config).config)
    assert found.attributes["blocks.0.second.eps"] == pytest.approx(1e-4 * 24 / 40)
    assert not found.config_keys and float((logits(source) - logits(target)).abs().max()) < 1e-5


def test_a_run_is_grown_with_its_moments_and_trains_on(tmp_path: Path) -> None:
    """On as many ranks as one likes: see tests/run/test_start_folder.py."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.txt").write_text("the river walks slowly under a green lamp " * 60)
    sections: dict[str, Any] = {
        "train": {"steps": 3, "batch": 4, "evaluate_every": 0, "checkpoint_every": 0},
        "data": {"source": f"text:{folder}/*.txt", "sequence": 32},
        "run": {"directory": str(tmp_path / "runs"), "display": "quiet"},
    }
    model: dict[str, Any] = {"hf": "llama", "config": {k: v for k, v in LLAMA.items() if k != "vocab_size"}}
    result = gossamer.train(model, None, sections)
    run = Path(result.run.path)
    config = tmp_path / "large.yaml"
    large = {k: v for k, v in LARGE.items() if k != "vocab_size"}
    config.write_text(yaml.safe_dump({**sections, "model": {"hf": "llama", "config": large}}))
    data = verbs.grow(run, config, out=tmp_path / "out")
    assert data["moments"] == ["mean", "square"] and data["step"] == 3
    start = StartFolder(tmp_path / "out")
    assert start.moment_rule == "adamw"
    assert start.moment_steps == 3 and (tmp_path / "out" / "tokenizer.json").is_file()
    name = "model.layers.0.mlp.down_proj.weight"
    at = open_checkpoint(run / "checkpoints", list_checkpoints(run / "checkpoints")[0])
    stored = at.read(f"optim/mean/{name}")
    assert torch.allclose(start.tensor(f"mean/{name}", MOMENTS)[:24, :36], stored, rtol=1e-5)
    more = gossamer.train({"hf": "llama", "config": large, "start": str(tmp_path / "out")}, None, sections)
    losses = [one.loss for one in more.run.records() if one.kind == "step"]
    before = [one.loss for one in result.run.records() if one.kind == "step"]
    assert losses[0] < before[0], "it starts where the small one ended"


@pytest.mark.parametrize("kind", ["adapter", "blocks", "folder of peft"])
def test_what_is_no_whole_model_is_refused_by_name(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    from gossamer.job import growth

    module: nn.Module = llama()
    if kind == "adapter":
        adapt(module, adapter("lora"), 0)
    if kind == "blocks":
        quantize_base(module, "int8")
    if kind == "folder of peft":
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(BadInput, match=r"with an adapter.*merge it first"):
            growth.read_source(tmp_path)
        return
    with pytest.raises(BadInput, match="with an adapter" if kind == "adapter" else "quantized blocks"):
        growth._check_plain(module, ModelSection(), "here")


def test_a_growth_that_is_not_lossless_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """A post-norm encoder whose width is no multiple: every map exists, and the proof fails."""
    from gossamer import grow
    from gossamer.job.growth import GrowthSource, grown_between
    from grow.grow_factory import encoder

    config = load(written(tmp_path, {"factory": "grow.grow_factory:encoder"})).config
    source = GrowthSource(module=spread_out(encoder()).eval(), place="here")
    with pytest.raises(BadInput, match=r"logits that differ by .* multiple of the source's"):
        grown_between(source, encoder(36, 6), grow.build("lemon"), config)
    found = grown_between(source, encoder(48, 8), grow.build("lemon"), config)
    assert found.said["logit_difference"] < 1e-12


def test_copies_that_compute_something_else_are_refused_where_depth_stays(tmp_path: Path) -> None:
    """Bloom's positions follow from the number of its heads, so that twice as many of them compute something else."""
    from transformers import BloomConfig, BloomForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 24, "n_layer": 1, "n_head": 4}
    torch.manual_seed(0)
    export_hf(spread_out(BloomForCausalLM(BloomConfig(**sizes))), None, None, tmp_path / "bloom")
    config = written(tmp_path, {"hf": "bloom", "config": {**sizes, "hidden_size": 48, "n_head": 8}})
    with pytest.raises(BadInput, match=r"logits that differ by .* keep .*the number of heads where positions follow"):
        verbs.grow(tmp_path / "bloom", config, by="de_coalesce", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_epsilon_that_a_config_cannot_say_alone_is_refused(tmp_path: Path) -> None:
    """The norms over a head's elements have the same key and keep their epsilon."""
    from gossamer import grow
    from gossamer.job.growth import GrowthSource, grown_between

    config = load(written(tmp_path, {"hf": "qwen3"})).config
    source = GrowthSource(module=spread_out(qwen3()).eval(), place="here")
    with pytest.raises(BadInput, match=r"a config that can say epsilon 6e-07 .*_norm.weight too, which keeps it"):
        grown_between(source, qwen3(hidden_size=40), grow.build("lemon"), config)
    assert grown_between(source, qwen3(hidden_size=48), grow.build("lemon"), config).said["logit_difference"] < 1e-12


@pytest.mark.parametrize(
    ("model", "by", "said"),
    [
        ({"config": {**LARGE, "hidden_size": 16, "num_hidden_layers": 1}}, "lemon", "larger than its source"),
        ({"config": LARGE}, "lemmon", "no growth is called 'lemmon'"),
        (
            {"hf": "SMALL", "config": {"num_key_value_heads": 3, "hidden_size": 48}},
            "lemon",
            "the target to run on 32 tokens",
        ),
        (
            {"hf": "SMALL3", "config": {"num_hidden_layers": 4}},
            "lemon",
            "wanted as many layer_types as num_hidden_layers, 4, got 2: full_attention, full_attention: set",
        ),
    ],
)
def test_bad_input(small: Path, tmp_path: Path, model: dict[str, Any], by: str, said: str) -> None:
    export_hf(qwen3(), None, None, tmp_path / "small3")
    kind = {"SMALL": str(small), "SMALL3": str(tmp_path / "small3")}.get(model.get("hf", ""), "llama")
    config = written(tmp_path, {**model, "hf": kind})
    with pytest.raises(BadInput, match=said):
        verbs.grow(small, config, by, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_dry_run_writes_nothing(small: Path, tmp_path: Path) -> None:
    config = written(tmp_path, {"hf": "llama", "config": LARGE})
    data = verbs.grow(small, config, "{lemon: {depth: 2}}", out=tmp_path / "out", dry_run=True)
    assert data["written"] is None and not (tmp_path / "out").exists()
    with pytest.raises(BadInput, match="which exists"):
        verbs.grow(small, config, out=small)


def test_coalesce_shrinks_and_interpolate_mixes(tmp_path: Path) -> None:
    """The whole cycle by the command: a large model, its small one, and back onto itself."""
    torch.manual_seed(0)
    export_hf(spread_out(gpt2(n_embd=48, n_head=8, n_layer=4)), None, None, tmp_path / "big")
    keys = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 64}
    down = written(tmp_path, {"hf": "gpt2", "config": {**keys, "n_embd": 24, "n_head": 4, "n_layer": 2}})
    verbs.grow(tmp_path / "big", down, "coalesce", out=tmp_path / "less")
    up = written(tmp_path, {"hf": "gpt2", "config": {**keys, "n_embd": 48, "n_head": 8, "n_layer": 4}})
    by = {"interpolate": {"onto": str(tmp_path / "big"), "alpha": 0.0}}
    data = verbs.grow(tmp_path / "less", up, by, out=tmp_path / "back")
    assert data["logit_difference"] > 0.01
    back = StartFolder(tmp_path / "back")
    original = origin_of(ModelSection(hf=str(tmp_path / "big"))).build(0)
    for name, tensor in original.named_parameters():
        assert torch.equal(back.tensor(name), tensor.detach()), name


def test_the_epsilon_of_a_source_goes_on_in_every_growth(tmp_path: Path) -> None:
    """Else a copy of the blocks would compute something else than they did."""
    export_hf(spread_out(llama(rms_norm_eps=0.01)), None, None, tmp_path / "small")
    config = written(tmp_path, {"hf": "llama", "config": {**LLAMA, "vocab_size": 50}})
    data = verbs.grow(tmp_path / "small", config, "g_stack", out=tmp_path / "out")
    assert data["logit_difference"] < 1e-12 and data["eps"] == [0.01]
    assert "the epsilon of norms becomes 0.01" in _told(data)
    start = StartFolder(tmp_path / "out")
    assert start.config_keys == {"rms_norm_eps": 0.01} and len(start.attributes) == 5
    built = origin_of(ModelSection(hf="llama", config=LLAMA | {"vocab_size": 50}, start=str(tmp_path / "out"))).build(0)
    assert built.model.norm.variance_epsilon == 0.01


def test_what_a_part_lets_rest_is_in_the_command_that_goes_on(small: Path, tmp_path: Path) -> None:
    config = written(tmp_path, {"hf": "llama", "config": {**LLAMA, "vocab_size": 50, "num_hidden_layers": 3}})
    data = verbs.grow(small, config, {"part": {"index": 1}}, out=tmp_path / "part 1")
    _, _, file, *overrides = shlex.split(data["next"])
    model = load(Path(file), overrides).config.model
    assert model.start == str(tmp_path / "part 1") and (model.freeze, model.unfreeze) == (["."], data["unfreeze"])
    trained = {name for name, one in origin_of(model).build(0).named_parameters() if one.requires_grad}
    blocks = [name for name in trained if name.startswith("model.layers.")]
    assert {name.split(".")[2] for name in blocks} == {"1", "2"}
    assert trained - set(blocks) == {"model.norm.weight", "lm_head.weight"}


class Running(nn.Module):
    """Blocks and a root with statistics; the table of positions is larger than that of tokens, and comes first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.positions, self.tokens = nn.Embedding(200, 8), nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(self.block() for _ in range(layers))
        self.head = nn.Linear(8, 20)
        self.register_buffer("seen", torch.ones(()))

    @staticmethod
    def block() -> nn.Module:
        made = nn.Linear(8, 8)
        made.register_buffer("seen", torch.ones(()))
        return made

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = x + block(x) * block.seen
        found: Tensor = self.head(x * self.seen)
        return found


def test_persistent_buffers_are_those_of_the_blocks_they_come_from() -> None:
    from gossamer.job.growth import GrowthSource, grown_between

    config = load(None, given={"model": {"hf": "llama"}, "data": {"sequence": 16}}).config
    small, large = Running(2), Running(4)
    small.seen.fill_(3.0)
    for block in small.blocks:
        block.seen.fill_(2.0)
    found = grown_between(GrowthSource(module=small.eval(), place="here"), large, grow.build("g_stack"), config)
    held = dict(found.tensors)
    assert held["seen"] == 3.0 and all(held[f"blocks.{at}.seen"] == 2.0 for at in range(4))
    small.blocks[1].seen.fill_(5.0)
    held = dict(
        grown_between(GrowthSource(module=small, place="here"), Running(4), grow.build("g_stack"), config).tensors
    )
    assert [float(held[f"blocks.{at}.seen"]) for at in range(4)] == [2.0, 5.0, 2.0, 5.0]  # each with its block


def test_what_is_stacked_keeps_the_epsilon_and_the_special_ids_of_its_source(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = {"bos_token_id": 7, "eos_token_id": 9}
    export_hf(spread_out(llama(rms_norm_eps=1e-2, **ids)), None, None, tmp_path / "small")
    large = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 50}
    verbs.grow(tmp_path / "small", written(tmp_path, {"hf": "llama", "config": large}), "g_stack", out=tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.rms_norm_eps == 1e-2
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (7, 9)
    assert (loaded.generation_config.bos_token_id, loaded.generation_config.eos_token_id) == (7, 9)
    origin = origin_of(ModelSection(hf="llama", config=large, start=str(tmp_path / "out")))
    assert torch.equal(logits(origin.build(1).eval()), logits(loaded))


def test_a_side_network_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the river walks slowly under a green lamp " * 100)
    sections: dict[str, Any] = {
        "train": {"steps": 1, "batch": 2, "evaluate_every": 0},
        "data": {"source": f"text:{tmp_path}/a.txt", "sequence": 32},
        "run": {"directory": str(tmp_path / "runs"), "display": "quiet"},
    }
    sizes = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    model = {"hf": "llama", "config": sizes, "side": {"unipt": {"reduction": 4}}}
    run = Path(gossamer.train(model, None, sections).run.path)
    config = written(tmp_path, {"hf": "llama", "config": {**sizes, "num_hidden_layers": 4}})
    for made in (
        lambda: verbs.grow(run, config, "g_stack", out=tmp_path / "out"),
        lambda: verbs.prune(run, by="magnitude", out=tmp_path / "out"),
        lambda: verbs.quantize(run, by="round_to_nearest", out=tmp_path / "out"),
    ):
        with pytest.raises(BadInput, match="side network"):
            made()
