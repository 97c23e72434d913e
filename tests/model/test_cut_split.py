"""A backward in two parts, and a forward run again, against the backward and the forward in one."""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gossamer.model.split.dataflow import CallOutput
from gossamer.model.split.in_flight import InFlight
from gossamer.model.split.reference import LockstepResult, LossFunction, gradients_of, run_lockstep, stages_of
from gossamer.model.split.split_backward import backward_input
from gossamer.model.split.split_points import SplitPoints, balanced_split, stage_specs
from gossamer.model.split.stage import StageModule
from gossamer.model.split.trace import trace
from gossamer.model.unit_seeds import unit_seeds
from gossamer.model.units import unit_names
from model.cuttable import MODULES, WIDTH, Chain, Layer, ResidualCnn, image, rows

Batch = Mapping[str, Any]
TEXT = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": TEXT | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "attention_dropout": 0.2},
    "gpt2": TEXT | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}  # fmt: skip


def mean_square(module: nn.Module, batch: Batch) -> Tensor:
    output: Tensor = module(batch["x"])
    return (output - 0.3).square().mean()


def in_bf16(module: nn.Module, batch: Batch, *, cache: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        output = module(batch["x"])
    return (output.float() - 0.3).square().mean()


def staged(module: nn.Module, loss: LossFunction, batch: Batch, cuts: int | SplitPoints) -> list[StageModule]:
    flow = trace(module, lambda: loss(module, batch), units=unit_names(module))
    return stages_of(module, flow, balanced_split(flow, cuts) if isinstance(cuts, int) else cuts)


def forward(
    stages: Sequence[StageModule], loss: LossFunction, batch: Batch, *, keep_graph: bool = True
) -> list[InFlight]:
    lives: list[InFlight] = []
    tensors: dict[CallOutput, Tensor] = {}
    for stage in stages:
        lives.append(stage.forward(partial(loss, stage.module, batch), tensors, keep_graph=keep_graph))
        tensors = lives[-1].sent
    return lives


def run_in_parts(
    stages: Sequence[StageModule], loss: LossFunction, batches: Sequence[Batch], *, keep_graph: bool = True
) -> LockstepResult:
    """The weights of a micro-batch after the forward and the inputs of the next one."""
    losses, waiting = [], list[InFlight]()
    for batch in batches:
        lives = forward(stages, loss, batch, keep_graph=keep_graph)
        losses.append(lives[-1].result.detach())
        gradients: dict[CallOutput, Tensor] = {}
        for live in reversed(lives):
            if not keep_graph:
                live.recompute()
            gradients = live.backward_input(gradients, loss=live.result)
        for live in waiting:
            live.backward_weight()
        waiting = lives
    for live in waiting:
        live.backward_weight()
    return LockstepResult(losses, gradients_of(stages))


def run_again(stages: Sequence[StageModule], loss: LossFunction, batches: Sequence[Batch]) -> LockstepResult:
    """All forwards, and then all backwards, each of a graph that is made only then."""
    lives = [forward(stages, loss, batch, keep_graph=False) for batch in batches]
    for one in lives:
        gradients: dict[CallOutput, Tensor] = {}
        for live in reversed(one):
            live.recompute()
            gradients = live.backward(gradients, loss=live.result)
    return LockstepResult([one[-1].result.detach() for one in lives], gradients_of(stages))


def assert_same(ours: LockstepResult, theirs: LockstepResult) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert ours.gradients.keys() == theirs.gradients.keys()
    different = [n for n, g in theirs.gradients.items() if not torch.equal(ours.gradients[n], g)]
    assert not different


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("kind", MODULES)
def test_input_and_weight_parts_are_the_whole(kind: str, stages: int) -> None:
    make, inputs = MODULES[kind]
    torch.manual_seed(0)
    module: nn.Module = make()
    batches = [{"x": inputs(seed)} for seed in range(3)]
    runs = [run_lockstep, run_in_parts, run_again, partial(run_in_parts, keep_graph=False)]
    whole, *others = [run(staged(module, mean_square, batches[0], stages), mean_square, batches) for run in runs]
    for other in others:
        assert_same(other, whole)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[] if one == "gpt2" else [pytest.mark.nightly]) for one in MODELS]
)
def test_models_of_transformers(kind: str, stages: int) -> None:
    """With dropout: every forward, again or not, is under the key of its micro-batch."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    module = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = [torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    batches = [{"input_ids": one, "labels": one} for one in ids]
    outcomes = []
    for run in (run_lockstep, run_in_parts, run_again, partial(run_in_parts, keep_graph=False)):
        parts = staged(module, lambda m, b: m(**b).loss, batches[0], stages)
        seeds = {id(part.module): unit_seeds(part.module, seed=1) for part in parts}

        def loss(m: nn.Module, b: Batch, by: Any = seeds) -> Tensor:
            with by[id(m)].at(0, int(b["labels"].sum())):
                found: Tensor = m(**b).loss
            return found

        outcomes.append(run(parts, loss, batches))
    for other in outcomes[1:]:
        assert_same(other, outcomes[0])


def test_under_autocast() -> None:
    torch.manual_seed(0)
    module, batches = MODULES["shared"][0](), [{"x": rows(seed)} for seed in range(2)]
    tracing = partial(in_bf16, cache=False)  # else a cast of a shared weight would cross units
    whole, parts, again = (
        run(staged(module, tracing, batches[0], 3), in_bf16, batches) for run in (run_lockstep, run_in_parts, run_again)
    )
    assert_same(parts, whole)
    assert_same(again, whole)


def _grown(seed: int, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """A few roots of a graph in which everything may lead everywhere, or nowhere."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [leaf.view_as(leaf) for leaf in leaves] + list(others) + [torch.ones(3, 3)]
    for _ in range(12):
        a, b, c = (tensors[int(torch.randint(len(tensors), (), generator=generator))] for _ in range(3))
        kind = int(torch.randint(5, (), generator=generator))
        made = [
            lambda a, b, c: (torch.tanh(a @ b),),
            lambda a, b, c: (a * b + c,),
            lambda a, b, c: (Counted.apply(a) - c,),
            lambda a, b, c: tuple(torch.cat([a, b.t()]).chunk(2)),
            lambda a, b, c: (nn.functional.layer_norm(a, (3,), b[0], c[0]),),
        ][kind](a, b, c)
        tensors += [one * 0.7 for one in made]
    return [t for t in tensors[-4:] if t.requires_grad]


BACKWARDS = ctypes.c_int()  # where nobody looks for what a backward changes


class Counted(torch.autograd.Function):
    """The identity, which counts how often it runs backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        BACKWARDS.value += 1
        return gradient


@pytest.mark.parametrize("seed", range(60))
def test_graphs_of_any_shape(seed: int) -> None:
    """Roots off the chain, values passed straight on, several uses: 2 leaves, 1 without gradient, 4 parameters."""
    torch.manual_seed(seed)
    leaves = [torch.randn(3, 3, requires_grad=i < 2) for i in range(3)]
    parameters = [torch.randn(3, 3, requires_grad=True) for _ in range(4)]
    roots = _grown(seed, leaves, parameters)
    gradients = [torch.randn(3, 3) for _ in roots]
    torch.autograd.backward(roots, gradients)
    wanted = [x.grad for x in [*leaves, *parameters]]
    flat = torch.zeros(4, 3, 3)
    for x in leaves:
        x.grad = None
    for x, view in zip(parameters, flat, strict=True):
        x.grad = view
    roots = _grown(seed, leaves, parameters)
    later = backward_input(roots, gradients, leaves)
    for x, grad in zip(leaves, wanted, strict=False):
        assert (x.grad is None) == (grad is None)
        assert grad is None or torch.equal(x.grad, grad)
    later.run()
    for view, grad in zip(flat, wanted[3:], strict=True):
        torch.testing.assert_close(view, torch.zeros(3, 3) if grad is None else grad, rtol=1e-5, atol=1e-5)
    assert all(x.grad is not None and x.grad.data_ptr() == v.data_ptr() for x, v in zip(parameters, flat, strict=True))


def flop(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_the_parts_together_are_as_much_work_as_the_whole() -> None:
    torch.manual_seed(0)
    module, batch = Chain(layers=6), {"x": rows()}
    cuts = SplitPoints(("blocks.0", "blocks.1", "head"))
    first, live, _ = forward(staged(module, mean_square, batch, cuts), mean_square, batch)
    gradients = {v: torch.ones_like(x) for v, x in live.sent.items()}
    whole = forward(staged(module, mean_square, batch, cuts), mean_square, batch)[1]
    one = 2 * 5 * WIDTH * WIDTH  # a product of (5, WIDTH) and (WIDTH, WIDTH)
    assert flop(lambda: whole.backward(gradients)) == 5 * 2 * one
    assert flop(lambda: live.backward_input(gradients)) == 5 * one
    assert flop(live.backward_weight) == 5 * one
    assert first.backward_input({v: torch.ones_like(x) for v, x in first.sent.items()}) == {}  # nothing was received
    assert flop(first.backward_weight) == 2 * one  # blocks.0 reads what `scale` has made


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + nn.functional.linear(x, Counted.apply(self.mix.weight)))


class CountingChain(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(4))


def test_what_lies_between_the_chain_and_a_parameter_runs_in_the_weight_part() -> None:
    module, batch = CountingChain(), {"x": rows()}
    lives = forward(staged(module, mean_square, batch, SplitPoints(("blocks.0", "blocks.1"))), mean_square, batch)
    BACKWARDS.value = 0
    lives[1].backward_input({}, loss=lives[1].result)
    assert BACKWARDS.value == 0
    lives[1].backward_weight()
    assert BACKWARDS.value == 3


class Pair(torch.autograd.Function):
    """Makes both gradients, whoever asks."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        Pair.calls += 1
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def test_a_function_in_python_runs_once() -> None:
    x, weight = torch.randn(3, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    bias = nn.Parameter(torch.randn(3))
    Pair.calls = 0
    later = backward_input([(Pair.apply(x, weight) * bias).sum()], [torch.tensor(1.0)], [x])
    assert weight.grad is not None and bias.grad is None
    later.run()
    assert Pair.calls == 1 and bias.grad is not None


def test_what_lies_between_the_chain_and_two_parameters_runs_once() -> None:
    x, a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    BACKWARDS.value = 0
    later = backward_input([(x * Counted.apply(a + b) @ b).sum()], [torch.tensor(1.0)], [x])
    later.run()  # b has two uses
    assert BACKWARDS.value == 1 and a.grad is not None and b.grad is not None


class Kept(Layer):
    """A part of it is checkpointed; counts its forwards."""

    runs: ClassVar[ctypes.c_int] = ctypes.c_int()  # where nobody looks for what a forward changes

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.other(checkpoint(self._mixed, x, use_reentrant=False)))

    def _mixed(self, x: Tensor) -> Tensor:
        Kept.runs.value += 1
        return torch.tanh(self.mix(torch.tanh(x)))


def test_a_checkpointed_region_is_recomputed_once() -> None:
    torch.manual_seed(0)
    module = Chain()
    module.blocks = nn.ModuleList(Kept() for _ in range(4))
    batches = [{"x": rows(seed)} for seed in range(2)]
    whole = run_lockstep(staged(module, mean_square, batches[0], 2), mean_square, batches)
    parts = staged(module, mean_square, batches[0], 2)
    Kept.runs.value = 0
    assert_same(run_in_parts(parts, mean_square, batches), whole)
    assert Kept.runs.value == 2 * 2 * 4  # micro-batches, forward and again, blocks
    live = forward(parts, mean_square, batches[0])[1]
    parts[1].module.zero_grad()
    live.backward_input({}, loss=live.result)
    kept, put_off = (parts[1].module.get_parameter(f"blocks.3.{name}.weight").grad for name in ("mix", "other"))
    assert kept is not None and put_off is None


class Reentrant(Layer):
    """Checkpointed in the way that torch allows in a backward of everything alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(super().forward, x, use_reentrant=True))


@pytest.mark.parametrize("keep_graph", [True, False])
def test_a_reentrant_checkpoint_has_a_backward_of_one_part(keep_graph: bool) -> None:
    torch.manual_seed(0)
    module, batches = Chain(), [{"x": rows(seed)} for seed in range(2)]
    module.blocks = nn.ModuleList(Reentrant() for _ in range(4))
    whole = run_lockstep(staged(module, mean_square, batches[0], 3), mean_square, batches)
    parts = staged(module, mean_square, batches[0], 3)
    assert_same(run_in_parts(parts, mean_square, batches, keep_graph=keep_graph), whole)


class Deep(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def test_compiled_code() -> None:
    """What was compiled for graphs that run once cannot run in one that is kept."""
    torch.manual_seed(0)
    module, batches = Chain(), [{"x": rows(seed)} for seed in range(2)]
    module.blocks = nn.ModuleList(Deep() for _ in range(4))
    parts = staged(module, mean_square, batches[0], 2)
    for block in (m for part in parts for m in part.module.modules() if isinstance(m, Deep)):
        block.mix.forward = torch.compile(block.mix.forward, backend="aot_eager")
    outcomes = []
    for run in (run_lockstep, run_in_parts, partial(run_in_parts, keep_graph=False)):
        outcomes.append(run(parts, mean_square, batches))
        assert counters["stats"]["unique_graphs"] > 0
        for part in parts:
            part.module.zero_grad()
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])


def test_hooks_on_a_tensor_count_once_and_a_parameter_s_fires() -> None:
    x, layer, fired = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 4), []
    layer.weight.register_post_accumulate_grad_hook(fired.append)

    def root() -> Tensor:
        made = layer(x)
        made.register_hook(lambda gradient: gradient * 0.5)
        return made.square().sum()

    root().backward()  # type: ignore[no-untyped-call]
    wanted, layer.weight.grad, x.grad = layer.weight.grad, None, None
    later = backward_input([root()], [torch.tensor(1.0)], [x])
    assert len(fired) == 1
    later.run()
    assert len(fired) == 2 and wanted is not None and torch.equal(layer.weight.grad, wanted)


class Marked(torch.autograd.Function):
    """The identity; its node holds itself a mark that lives as long."""

    marks: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark = nn.Identity()
        Marked.marks.add(ctx.mark)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MarkedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Marked.apply(x))


def test_the_weight_part_frees_the_graph_and_a_forward_may_keep_none() -> None:
    module, batch = Chain(), {"x": rows()}
    module.blocks = nn.ModuleList(MarkedLayer() for _ in range(4))
    parts = staged(module, mean_square, batch, SplitPoints(("blocks.0", "blocks.1", "blocks.3")))
    gc.collect()
    gc.disable()
    try:
        lives = forward(parts, mean_square, batch, keep_graph=False)
        assert len(Marked.marks) == 0
        with pytest.raises(AssertionError, match="needs recompute"):
            lives[2].backward({}, loss=lives[2].result)
        lives[2].recompute()
        assert len(Marked.marks) == 1
        gradients = lives[2].backward_input({}, loss=lives[2].result)
        lives[2].backward_weight()
        assert len(Marked.marks) == 0
        lives = forward(parts, mean_square, batch)
        assert len(Marked.marks) == 4
        lives[1].backward_input(gradients)
        assert len(Marked.marks) == 4
        lives[1].backward_weight()
        assert len(Marked.marks) == 2
    finally:
        gc.enable()


class Following(Layer):
    """Divides by a running size, which every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.size.lerp_(x.abs().max(), 0.3)
        return super().forward(x / self.size)


def following() -> nn.Module:
    module = Chain()
    module.blocks = nn.ModuleList(Following() for _ in range(4))
    return module


@pytest.mark.parametrize(("make", "inputs"), [(ResidualCnn, image), (following, rows)])
def test_buffers_count_every_micro_batch_once(make: Callable[[], nn.Module], inputs: Callable[[int], Tensor]) -> None:
    """All forwards before the first is run again: each starts from what it found the first time."""
    torch.manual_seed(0)
    module, batches = make(), [{"x": inputs(seed)} for seed in range(3)]
    before = dict(module.named_buffers())
    parts, others = (staged(module, mean_square, batches[0], 2) for _ in range(2))
    assert_same(run_again(others, mean_square, batches), run_lockstep(parts, mean_square, batches))
    moved = 0
    for part, other in zip(parts, others, strict=True):
        for name, buffer in other.module.named_buffers():
            if part.names[name] in part.part.holds:
                assert torch.equal(buffer, part.module.get_buffer(name))
                moved += not torch.equal(buffer, before[name])
    assert moved == len(before)


def test_a_batch_is_run_again_as_what_it_was_when_others_have_followed() -> None:
    module = MODULES["gnn"][0]()
    batches = [{"x": rows(count=5)}, {"x": rows(count=7)}]
    flows = [trace(module, partial(mean_square, module, batch), units=unit_names(module)) for batch in batches]
    cuts = balanced_split(flows[0], 2)
    whole, again = (stages_of(module, flows[0], cuts) for _ in range(2))
    ways = [stage_specs(module, flow, cuts) for flow in flows]

    def lives(stages: list[StageModule], kind: int, *, keep_graph: bool) -> list[InFlight]:
        for stage, part in zip(stages, ways[kind], strict=True):
            stage.follow(flows[kind], part)
        return forward(stages, mean_square, batches[kind], keep_graph=keep_graph)

    for kind in range(2):
        gradients: dict[CallOutput, Tensor] = {}
        for live in reversed(lives(whole, kind, keep_graph=True)):
            gradients = live.backward(gradients, loss=live.result)
    for waiting in [lives(again, kind, keep_graph=False) for kind in range(2)]:
        gradients = {}
        for live in reversed(waiting):
            live.recompute()
            gradients = live.backward(gradients, loss=live.result)
    assert_same(LockstepResult([], gradients_of(again)), LockstepResult([], gradients_of(whole)))


class Alternating(Layer):
    """Every other forward is of another function; draws from an iterator, and counts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen, self.turns = 0, [1.0], itertools.cycle([1.0, 0.5, 0.25])

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.seen.append(0.1)
        return super().forward(x) * (1.3 if self.n % 2 else 1.0) * next(self.turns) * sum(self.seen)


@pytest.mark.parametrize("stages", [2, 3])
def test_what_python_keeps_counts_every_micro_batch_once(stages: int) -> None:
    torch.manual_seed(0)
    module = Chain()
    module.blocks = nn.ModuleList(Alternating() for _ in range(4))
    batches = [{"x": rows(seed)} for seed in range(4)]
    parts, others = (staged(module, mean_square, batches[0], stages) for _ in range(2))
    assert_same(run_again(others, mean_square, batches), run_lockstep(parts, mean_square, batches))
    for part, other in zip(parts, others, strict=True):
        for a, b in zip(part.module.blocks, other.module.blocks, strict=True):
            assert (a.n, a.seen, next(a.turns)) == (b.n, b.seen, next(b.turns))
