"""What a trace costs, and that a trace without activations sees what one with them sees."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gossamer.model.flop import UNCOUNTED
from gossamer.model.split.dataflow import CallOutput, DataFlow
from gossamer.model.split.meta_init import MetaModel
from gossamer.model.split.split_points import SplitPoints, balanced_split, stage_specs
from gossamer.model.split.trace import trace
from gossamer.model.units import unit_names
from gossamer.spec.errors import BadInput
from model.cuttable import MODULES, WIDTH, Chain, Layer, rows

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "attention_dropout": 0.2}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": SIZES | {"num_local_experts": 4, "output_router_logits": True, "pad_token_id": 0},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


class Largest(TorchDispatchMode):
    """The largest memory of a real tensor that operators made, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        real = [
            x for x in tree_leaves(out) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and not x.is_meta
        ]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() for x in real)])
        return out


def transformer(kind: str, keys: Mapping[str, Any] | None = None) -> nn.Module:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(CONFIGS[kind] if keys is None else keys))
    module = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(module, nn.Module)
    return module.train()


def text(padded: bool, sequence: int = 12, high: int = 64) -> dict[str, Tensor]:
    ids = torch.randint(3, high, (2, sequence), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, sequence - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = module(**batch, use_cache=False).loss
    return loss


def counted(run: Callable[[], Any]) -> tuple[Callable[[], Any], list[None]]:
    calls: list[None] = []

    def again() -> Any:
        calls.append(None)
        return run()

    return again, calls


def both(module: nn.Module, run: Callable[[], Any]) -> tuple[DataFlow, DataFlow, int]:
    """The flow as it is found, the one of a real run, and how many forwards the former took."""
    watched, calls = counted(run)
    units = unit_names(module)
    return trace(module, watched, units=units), trace(module, run, units=units, fake=False), len(calls)


@pytest.mark.parametrize("kind", MODULES)
def test_without_activations_the_flow_of_a_module_is_the_same(kind: str) -> None:
    make, inputs = MODULES[kind]
    module, x = make(), inputs()
    ours, theirs, forwards = both(module, lambda: module(x).square().mean())
    assert ours == theirs and forwards == 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_without_activations_the_flow_of_a_transformer_is_the_same(kind: str, padded: bool) -> None:
    module, batch = transformer(kind), text(padded)
    ours, theirs, forwards = both(module, lambda: loss_of(module, batch))
    assert ours == theirs and forwards == 1 and ours.readers


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_a_skeleton_is_traced_without_memory(kind: str) -> None:
    skeleton, batch = MetaModel.of(lambda: transformer(kind)), text(True)
    with Largest() as made:
        flow = trace(skeleton.module, lambda: loss_of(skeleton.module, batch), units=unit_names(skeleton.module))
    module = transformer(kind)
    with Largest() as real:
        expected = trace(module, lambda: loss_of(module, batch), units=unit_names(module), fake=False)
    assert flow == expected
    logits = batch["input_ids"].numel() * 64 * 4
    assert real.largest >= logits and made.largest <= 4 * 2 * 12 * 12  # no more than the mask of attention


class Asking(Chain):
    """Python looks at a number: within a block, or between blocks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.blocks[1] = AskingLayer() if where == "in a block" else Layer()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.where == "between blocks" and x.sum().item() > 1000:
                x = x * 2
            elif self.where == "and hides it":
                with contextlib.suppress(Exception):
                    x = x * float(x.sum() > -1000)
        return self.head(x)


class AskingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() < 1000 else x


@pytest.mark.parametrize("where", ["in a block", "between blocks", "and hides it"])
def test_a_forward_that_looks_at_a_number_runs_for_real(where: str) -> None:
    module, x = Asking(where), rows()
    ours, theirs, forwards = both(module, lambda: module(x).square().mean())
    assert ours == theirs and forwards == 2
    assert bool(ours.branches) == (where != "in a block")


class AskingTheBatch(Chain):
    """What Python looks at does not depend on parameters: a mask of the batch, a buffer, a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        if (x > 0).all() or self.steps.item() > 1 or torch.rand([]) > 2:
            raise AssertionError("another way than the real run")
        if (x > 0).any():
            x = self.blocks[3](x)
        return super().forward(x)


def test_what_depends_on_the_batch_and_buffers_alone_is_real() -> None:
    module, x = AskingTheBatch(), rows()
    ours, theirs, forwards = both(module, lambda: module(x).square().mean())
    assert ours == theirs and forwards == 1 and ours.calls[1].name == "blocks.0" and module.steps == 0


class Writing(Chain):
    """Writes activations into a real tensor, and looks at it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(4, len(x), WIDTH)
        for i, block in enumerate(self.blocks):
            x = kept[i] = block(x)
        if kept.view(-1).sum().item() == 0:
            raise AssertionError("another way than the real run")
        return self.head(kept.mean(0))


def test_a_real_tensor_that_an_activation_was_written_to_is_one() -> None:
    module, x = Writing(), rows()
    ours, theirs, forwards = both(module, lambda: module(x).square().mean())
    assert ours == theirs and forwards == 2 and ours.branches.keys() == {CallOutput(i, 0) for i in range(4)}


class Remembering(Chain):
    """Keeps activations where a later forward would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.kept: list[Tensor] = []
        self.named: dict[str, Tensor] = {"before": torch.ones(1)}
        self.last: Tensor | None = None
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
            self.kept.append(x)
            self.named["after"] = self.last = x.detach()
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.head(x)


@pytest.mark.parametrize("fake", [True, False])
def test_a_module_is_left_as_it_was(fake: bool) -> None:
    module, x = Remembering(), rows()
    before, generator = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    trace(module, lambda: module(x).square().mean(), units=unit_names(module), fake=fake)
    held = [*vars(module).values(), *module.buffers()]
    assert not any(isinstance(t, FakeTensor) for t in tree_leaves(held)) and module.kept == []
    assert module.named.keys() == {"before"} or not fake  # a detached tensor is as good as any that was there
    for name, t in module.state_dict().items():
        assert torch.equal(t, before[name]) or (name == "mean" and not fake)
    assert torch.equal(generator, torch.get_rng_state())


class Physics(Chain):
    """The loss has a gradient in it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope[:, :3]


def test_a_gradient_within_a_forward_is_traced_whether_real_or_not() -> None:
    module, x = Physics(), rows()
    ours, theirs, forwards = both(module, lambda: module(x).square().mean())
    assert ours == theirs and forwards == 1


def test_no_activation_outlives_its_reader_in_a_real_run() -> None:
    module, x = Chain(layers=6), rows()
    alive, born = ctypes.py_object([]), ctypes.py_object([])  # a trace puts back what hooks fill, where it looks

    def count(block: nn.Module, _: Any, out: Tensor) -> None:
        mapped = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef(out.untyped_storage())
        born.value.append(mapped)
        alive.value.append(sum(not b.expired() for b in born.value))

    for block in module.blocks:
        block.register_forward_hook(count)
    trace(module, lambda: module(x).square().mean(), units=unit_names(module), fake=False)
    assert max(alive.value) <= 2


def test_errors_of_the_model_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    module = Chain()
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="must match the size"):
        trace(module, lambda: module(torch.ones(2, WIDTH + 1)), units=unit_names(module))
    assert not caplog.records


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
@pytest.mark.parametrize("fake", [True, False])
def test_the_flop_of_all_calls_is_that_of_the_forward(kind: str, fake: bool) -> None:
    module, batch = transformer(kind), text(True)
    flow = trace(module, lambda: loss_of(module, batch), units=unit_names(module), fake=fake)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        loss_of(module, batch)
    assert sum(call.flop for call in flow.calls) == counter.get_total_flops()
    if kind == "mixtral":  # two of four experts, each three products, in two layers
        assert counter.get_flop_counts()["Global"][torch.ops.aten._grouped_mm] == 2 * 2 * 3 * (2 * 24 * 32 * 48)
    assert sum(call.parameter_bytes for call in flow.calls) >= 4 * sum(p.numel() for p in module.parameters())


def test_stages_are_of_equal_work() -> None:
    """Two wide layers weigh as much as eight of half the width, however many units that is."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(16, 16) for _ in range(8)), nn.Linear(16, 32), *(nn.Linear(32, 32) for _ in "12")
    )
    flow = trace(module, lambda: module(torch.ones(256, 16)), units=unit_names(module))
    assert flow.calls[0].flop == 2 * 256 * 16 * 16 and flow.calls[0].parameter_bytes == 4 * (16 * 16 + 16)
    assert balanced_split(flow, 2) == SplitPoints(("0", "8"))
    assert balanced_split(flow, 2, costs=dict.fromkeys(flow.units, 1.0)) == SplitPoints(("0", "6"))


def test_an_embedding_is_not_free() -> None:
    module = nn.Sequential(nn.Embedding(4096, 16), *(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4096))
    ids = torch.zeros(2, dtype=torch.int64)
    flow = trace(module, lambda: module(ids), units=unit_names(module))
    assert flow.calls[0].flop == 0 and balanced_split(flow, 3).first == ("0", "1", "5")


def test_reentrant_checkpointing_is_refused_after_all() -> None:
    class Frozen(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(torch.utils.checkpoint.checkpoint(self.blocks[0], x, use_reentrant=True))

    module = Frozen()
    with pytest.raises(BadInput, match="reentrant"):
        trace(module, lambda: module(rows().requires_grad_()), units=unit_names(module))


def test_cuts_found_without_memory_are_those_of_the_model() -> None:
    module, batch = transformer("gpt2"), text(False)
    skeleton = MetaModel.of(lambda: transformer("gpt2"))
    flows = [trace(m, lambda m=m: loss_of(m, batch), units=unit_names(m)) for m in (module, skeleton.module)]
    cuts = [balanced_split(flow, 3) for flow in flows]
    assert cuts[0] == cuts[1]
    assert stage_specs(module, flows[0], cuts[0]) == stage_specs(skeleton.module, flows[1], cuts[1])


@pytest.mark.parametrize("fake", [True, False])
def test_a_shared_weight_is_cast_by_every_unit_that_uses_it(fake: bool) -> None:
    """Autocast keeps the first cast for all; in stages each unit makes its own."""
    module = MODULES["shared"][0]()

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(rows()).float().sum()

    units = unit_names(module)
    flow = trace(module, run, units=units, fake=fake)
    for call in flow.calls[1:]:
        stage_specs(module, flow, SplitPoints((flow.calls[0].name, call.name)))
