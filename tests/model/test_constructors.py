"""Whatever a constructor does, a stage holds what one process would hold, bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gossamer import loss
from gossamer.model.export import export_hf
from gossamer.model.source.factory import Factory
from gossamer.model.source.hf import Hf
from gossamer.model.split.absent_tensor import AbsentTensor
from gossamer.model.split.constructor_state import ConstructorState, tensors_of
from gossamer.partition.model_provider import ModuleSource, OriginSource
from gossamer.partition.rank_model import RankModel, build_rank_model
from gossamer.partition.request import PartitionRequest
from gossamer.run.batches import DatasetBatches
from gossamer.spec.config import RunConfig
from gossamer.spec.errors import BadInput
from model.constructors import COMPUTED, SIMPLE, WORDS, Block, Net, reset
from model.tiny import CONFIGS

STAGES = 3
ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, WORDS, (8, 10), generator=torch.Generator().manual_seed(5))
]


def source(kind: str, function: str = "model.constructors:made") -> OriginSource:
    """As in a new process."""
    reset()
    return OriginSource(Factory(function, {"kind": kind} if kind else {}), 3)


def held(given: Any, rank: int, ranks: int = STAGES) -> RankModel:
    config = RunConfig.model_validate({"train": {"batch": 8}, "plan": {"mesh": {"pipe": ranks}}})
    asked = PartitionRequest(
        config=config,
        ranks=ranks,
        rank=rank,
        batches=DatasetBatches(ROWS),  # type: ignore[arg-type]
        objective=loss.build("next_token"),
        device=torch.device("cpu"),
    )
    return build_rank_model(given, asked)


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: frozenset[str]) -> None:
    for name in names:
        assert not isinstance(ours[name], FakeTensor), name
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


# Of these another one by day draws, computes or reads in the same way.
BY_NIGHT = frozenset(
    (
        "normal", "far truncated", "sparse", "own scale", "normed rows", "gru", "encoder layers", "global counter",
        "of another width", "conv", "copied data", "another model's", "gains", "teacher", "deepcopy", "soup",
        "int8", "codebook", "averages", "parameter of another", "tolist", "sorted", "encoder", "decoder",
        "transformer", "old weight norm", "orthogonal parametrization", "spectral norm", "interpolated", "partial copy",
        "quantile", "whitened",
    )
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.nightly] if k in BY_NIGHT else []) for k in (*SIMPLE, *COMPUTED)]
)
def test_a_stage_holds_what_one_process_holds(kind: str) -> None:
    whole = tensors_of(source(kind).whole())
    seen = set()
    for rank in range(STAGES):
        ours = held(source(kind), rank)
        assert ours.cut is not None
        same(tensors_of(ours.module), whole, ours.cut.holds)
        seen |= ours.cut.holds
        assert ours.plan.reasons.get("build", "").startswith("whole on every rank: ") == (kind in COMPUTED)
    assert seen >= {name for name, _ in source(kind).whole().named_parameters()}


HANDED_OVER = ("tied", "attributes", "lstm", "parametrized", "batch norm", "frozen copy", "spectral norm")  # by day


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in HANDED_OVER else [pytest.mark.nightly]) for k in (*SIMPLE, *COMPUTED)],
)
def test_a_module_that_is_handed_over_keeps_its_numbers(kind: str) -> None:
    module = source(kind).whole()
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
    ours = held(ModuleSource(module), 1)
    assert ours.cut is not None and ours.module is module
    same(tensors_of(ours.module), before, ours.cut.holds)


class Locked(Block):
    """What no copy can be made of, beside what can."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.generator, self.act = threading.Lock(), torch.Generator().manual_seed(3), lambda x: x
        self.log = open(os.devnull, "w")  # noqa: SIM115

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


def test_a_module_with_locks_and_files_is_handed_over() -> None:
    module = Net(Locked)
    ours = held(ModuleSource(module), 1)
    assert ours.cut is not None and ours.cut.ways.module is not module
    for block in module.blocks:
        assert isinstance(block, Locked)
        block.log.close()


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Net()
    vars(module)["drawn"] = (x for x in range(3))
    with pytest.raises(BadInput, match=r"can be copied.*model\.factory"):
        held(ModuleSource(module), 1)


def test_a_part_of_saved_weights_is_read_without_the_whole(tmp_path: Path) -> None:
    fresh = Hf("llama", CONFIGS["llama"]).fitted_to_tokenizer(257, 256)
    export_hf(fresh.build(3), fresh, None, tmp_path / "saved")
    given = OriginSource(Hf(str(tmp_path / "saved")), 0)
    expected = tensors_of(fresh.build(3))
    names = frozenset([name for name in expected if "layers.1." in name])
    assert given.construction() == ConstructorState()
    part = tensors_of(given.part(names))
    same(part, expected, names)
    assert all(
        part[name].untyped_storage().nbytes() == 4 for name in dict(given.outline().named_parameters()).keys() - names
    )
    assert given.digests().keys() >= {"", *names}


REFUSED = {
    "Sliced": "blocks.0.mix.weight, which the constructor computed from a parameter",
    "sliced_data": "blocks.0.mix.weight, which the constructor computed from a parameter",
    "Followed": "embed.weight (stage 0) and head.first (stage 2)",
    "tied_by_data": "embed.weight (stage 0) and head.weight (stage 2)",
    "expanded": "head.bias memory for every element, got one number, repeated",
    "never_called": "head.weight of a lazy module that was never called",
    "from_the_system": "got different numbers for head.weight",
    "from_the_clock": "same numbers every time it runs, got different numbers for head.bias",
    "from_numpy_unseeded": "same numbers every time it runs, got different numbers for head.bias",
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("function", REFUSED)
def test_what_is_refused_by_name(function: str, rank: int) -> None:
    with pytest.raises(BadInput) as refused:
        held(source("", f"model.constructors:{function}"), rank)
    assert REFUSED[function] in str(refused.value)


def test_one_memory_within_a_stage_stays_one() -> None:
    ours = held(source("", "model.constructors:tied_within"), 1)
    assert ours.cut is not None and "blocks.1.mix.weight" in ours.cut.holds
    parameters = dict(ours.module.named_parameters())
    first, second = parameters["blocks.1.mix.weight"], parameters["blocks.1.other.weight"]
    assert first is not second and first.data_ptr() == second.data_ptr() != 0


def test_what_is_not_held_has_no_memory() -> None:
    ours = held(source("gains"), 1)
    assert ours.cut is not None
    for name, parameter in ours.module.named_parameters():
        assert isinstance(parameter, AbsentTensor) == (name not in ours.cut.holds)
        assert isinstance(parameter, AbsentTensor) or parameter.untyped_storage().nbytes() > parameter.element_size()
    outline = ours.cut.ways.module
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in outline.parameters())
    assert outline.blocks[1].gain == ours.module.blocks[1].gain != 1.0  # type: ignore[index, union-attr]


def test_the_reason_names_the_parameters() -> None:
    reasons = {kind: source(kind).construction().reason for kind in ("copied", "gains", "deepcopy", "lazy")}
    assert reasons == {
        "copied": "whole on every rank: head.weight is computed from embed.weight",
        "gains": "whole on every rank: a number is read from blocks.0.mix.weight",
        "deepcopy": "whole on every rank: blocks.0.mix.weight is a copy, made of other parameters",
        "lazy": "whole on every rank: weight of a LazyLinear is a UninitializedParameter",
    }
    assert "draws from a generator of its own" in source("generator of its own").construction().reason


def test_a_constructor_that_is_run_again_gives_the_same() -> None:
    given = source("global counter")
    first = dict(tensors_of(given.whole()))
    ours = held(given, 1)
    assert ours.cut is not None
    same(tensors_of(ours.module), first, ours.cut.holds)
    same(tensors_of(given.whole()), first, frozenset(first))


@pytest.mark.parametrize(("function", "name"), [("by_rank", ""), ("by_rank_and_computed", "embed.weight")])
def test_a_rank_that_holds_nothing_of_it_sees_another_constructor(
    function: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for rank in (1, 2):  # neither holds the embedding
        monkeypatch.setenv("GOSSAMER_TEST_RANK", str(rank))
        cut = held(source("", f"model.constructors:{function}"), rank).cut
        assert cut is not None and "embed.weight" not in cut.holds
        seen.append(cut.digests)
    assert seen[0][name] != seen[1][name]
