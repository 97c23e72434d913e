from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.model.compiled import compile_units
from gossamer.model.forward_adapter import caller_of
from gossamer.model.source.hf import Hf
from gossamer.model.unit_seeds import UnitSeeds, mix, unit_seeds
from gossamer.model.units import block_names, unit_names
from model.tiny import CONFIGS, Plain, batch


def gradients(module: nn.Module, seeds: UnitSeeds, *key: int, noise: int = 0) -> Tensor:
    torch.rand(noise)
    module.zero_grad()
    with seeds.at(*key):
        output = caller_of(module)(module, batch())
        (output.loss if hasattr(output, "loss") else output.square().mean()).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_units_are_blocks_and_what_else_owns_parameters() -> None:
    assert unit_names(Plain()) == ("embed", "blocks.0", "blocks.1", "blocks.2", "head")
    assert block_names(Plain()) == ("blocks.0", "blocks.1", "blocks.2")
    gpt2 = Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0)
    expected = ("wte", "wpe", "h.0", "h.1", "ln_f")
    assert unit_names(gpt2) == (*(f"transformer.{n}" for n in expected), "lm_head")
    assert unit_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ("0", "2")
    assert unit_names(nn.Linear(2, 2)) == ("",) and block_names(nn.Linear(2, 2)) == ()


def test_mixing_has_no_near_keys() -> None:
    low = {mix(seed, step, batch, unit) & 0xFFFFFFFF for seed in range(4) for step in range(16) for batch in range(16)
           for unit in range(16)}  # fmt: skip
    assert len(low) > 16380  # of 16384; chance alone loses 0.03
    flips = [bin(mix(1, 2, 3) ^ mix(1, 2, 3 ^ (1 << bit))).count("1") for bit in range(64)]
    assert all(16 <= f <= 48 for f in flips)
    assert mix(1, 2) != mix(2, 1)


@pytest.mark.parametrize("kind", ["plain", "gpt2"])
def test_dropout_depends_on_the_key_alone(kind: str) -> None:
    module: nn.Module = (
        Plain() if kind == "plain" else Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0)
    )
    seeds = unit_seeds(module, seed=1)
    first = gradients(module, seeds, 3, 8)
    assert torch.equal(first, gradients(module, seeds, 3, 8, noise=5))
    assert not torch.equal(first, gradients(module, seeds, 3, 9))
    assert not torch.equal(first, gradients(module, seeds, 4, 8))
    seeds.remove()
    other = unit_seeds(module, seed=2)
    assert not torch.equal(first, gradients(module, other, 3, 8))


def test_the_generator_outside_is_left_alone() -> None:
    module = Plain()
    seeds = unit_seeds(module, seed=1)
    before = torch.get_rng_state()
    gradients(module, seeds, 0, 0)
    with pytest.raises(KeyError), seeds.at(0, 1):
        raise KeyError
    assert torch.equal(before, torch.get_rng_state())
    outputs = [module(batch()["input_ids"]) for _ in range(2)]  # outside: dropout as torch draws it
    assert not torch.equal(*outputs) and not torch.equal(before, torch.get_rng_state())


def test_draws_of_one_unit_do_not_move_those_of_the_next() -> None:
    """As where another rank owns the first blocks."""

    def mask(first_runs: bool) -> Tensor:
        module = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
        module.forward = lambda x: module[1]((module[0](x) * 0 if first_runs else x * 0) + 1)  # type: ignore[method-assign]
        torch.nn.init.ones_(module[1][0].weight)
        torch.nn.init.zeros_(module[1][0].bias)
        with unit_seeds(module, seed=0).at(0, 0):
            return module(torch.ones(8, 4))

    assert torch.equal(mask(True), mask(False))


class Recomputed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        logits: Tensor = self.head(h)
        return logits


def test_recomputing_gives_the_same_numbers() -> None:
    plain, recomputed = Plain(), Recomputed()
    recomputed.load_state_dict(plain.state_dict())
    kept = gradients(plain, unit_seeds(plain, seed=1), 5, 6)
    assert torch.equal(kept, gradients(recomputed, unit_seeds(recomputed, seed=1), 5, 6))


def test_recomputing_under_no_key_is_refused() -> None:
    module = Recomputed()
    with unit_seeds(module, seed=1).at(0, 0):
        loss = module(batch()["input_ids"]).mean()
    with pytest.raises(RuntimeError, match=r"UnitSeeds\.at"):
        loss.backward()


def test_the_recomputing_of_transformers_gives_the_same_numbers() -> None:
    module = Hf("gpt2", CONFIGS["gpt2"]).fitted_to_tokenizer(257, 256).build(0)
    seeds = unit_seeds(module, seed=1)
    kept = gradients(module, seeds, 0, 0)
    checkpoints = []
    for block in module.transformer.h:  # type: ignore[union-attr]
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = lambda f, *a: (
            checkpoints.append(1) or checkpoint(f, *a, use_reentrant=False)
        )
    assert torch.equal(kept, gradients(module, seeds, 0, 0)) and len(checkpoints) == 2


def test_compiled_units_keep_their_hooks_outside() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = Plain()
    names = [n for n, _ in module.named_parameters()]
    assert compile_units(module, backend="aot_eager") == ("blocks.0", "blocks.1", "blocks.2")
    seeds = unit_seeds(module, seed=1)
    first = gradients(module, seeds, 3, 8)
    assert torch.equal(first, gradients(module, seeds, 3, 8, noise=5))
    assert not torch.equal(first, gradients(module, seeds, 3, 9))
    assert not torch._dynamo.utils.counters["graph_break"] and [n for n, _ in module.named_parameters()] == names
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_module_compiled_whole_is_seeded_at_its_top() -> None:
    module = torch.compile(Plain(), backend="aot_eager")
    seeds = unit_seeds(module, seed=1)  # type: ignore[arg-type]
    assert seeds.units == ("",)
    first = gradients(module, seeds, 3, 8)  # type: ignore[arg-type]
    assert torch.equal(first, gradients(module, seeds, 3, 8, noise=5))  # type: ignore[arg-type]
    assert not torch.equal(first, gradients(module, seeds, 3, 9))  # type: ignore[arg-type]
