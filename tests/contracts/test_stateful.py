"""What every component that keeps state owes: it takes back what it gave, refuses before it moves, from any source.

Ranks are built one after the other in this process, with the real components and without any message: nothing here
trains, so the state is random numbers, of which no two ranks have the same unless all ranks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from gossamer import exchange, optimizer, sharding, sync
from gossamer.comm.message import ProcessGroups
from gossamer.model.precision import precision_of
from gossamer.run.checkpoint import CheckpointContents, contents_of, trainable
from gossamer.run.goal import Progress
from gossamer.run.loss_scale import LossScale
from gossamer.run.watch import Watch
from gossamer.sharding import ShardedOptimizer
from gossamer.spec.errors import CheckpointMismatch
from gossamer.store.checkpoint import CheckpointSource, open_checkpoint
from gossamer.store.slices import REPLICATED, NamedSlice, Slice
from gossamer.store.stateful import SliceCopies, Stateful, StateSlice, StateSource, TensorKind
from gossamer.sync import GradientReducer, outer_loop_of
from store.crew import good, save

ADAMW = {"adamw": {"lr": 1e-3}}
DILOCO = {"diloco": {"sync_every": 3, "exchange": {"error_feedback": {"topk": {"fraction": 0.2}}}}}


@dataclass(frozen=True)
class Memory(StateSource):
    """The state of ranks that are still alive, in a dict: what is to be read is never on a disk."""

    pieces: Sequence[NamedSlice]
    values: Mapping[str, Any]
    held: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for where, tensor in self.pieces:
            room = self.held.setdefault((where.name, where.replica), torch.empty(where.shape, dtype=tensor.dtype))
            box(room, where).copy_(tensor)

    @property
    def label(self) -> str:
        return "the memory of the ranks"

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.values

    def names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.held)

    def versions(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(replica for held, replica in self.held if held == name))

    def kind(self, name: str, version: int = REPLICATED) -> TensorKind:
        held = self.held[name, version]
        return tuple(held.shape), held.dtype

    def read(self, where: Slice) -> Tensor:
        return box(self.held[where.name, where.replica], where).clone()


def box(tensor: Tensor, where: Slice) -> Tensor:
    for dim, (at, count) in enumerate(zip(where.start, where.size, strict=True)):
        tensor = tensor.narrow(dim, at, count)
    return tensor


def on_disk(folder: Path, ranks: Sequence[list[NamedSlice]], meta: Mapping[str, Any]) -> StateSource:
    good(save(folder, 1, ranks, meta))
    return CheckpointSource(open_checkpoint(folder, 1))


def in_memory(folder: Path, ranks: Sequence[list[NamedSlice]], meta: Mapping[str, Any]) -> StateSource:
    return Memory([(where, tensor.clone()) for pieces in ranks for where, tensor in pieces], meta)


Keep = Callable[[Path, Sequence[list[NamedSlice]], Mapping[str, Any]], StateSource]


class Model(nn.Module):
    """Parameters of a few shapes, one of them in fewer rows than ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)


@dataclass(frozen=True)
class Way:
    """A way to train: what of the state is sharded, what belongs to islands, and who sees the disk."""

    sharding: Any = "none"
    sync: Any = "every_step"
    exchange: Any = "dense"
    residuals: str = "redistribute"
    optimizer: Any = field(default_factory=lambda: ADAMW)
    alone: bool = False  # each rank has a disk of its own


WAYS = {
    "replicated": Way(),
    "error_feedback": Way(exchange={"error_feedback": {"topk": {"fraction": 0.5}}}),
    "sharded": Way(sharding="zero1"),
    "sharded_by_rank": Way(sharding="zero1", alone=True),
    "islands": Way(sync=DILOCO),
}


def rank_of(way: Way, rank: int, ranks: int, seed: int) -> tuple[CheckpointContents, SimpleNamespace]:
    """The components of one rank, with random state, and what they are of."""
    torch.manual_seed(seed)
    module = Model()
    params = trainable(module)
    levels = ProcessGroups.flat(ranks)
    if way.sync != "every_step":
        levels = ProcessGroups.islands([[one] for one in range(ranks)]).twice()
    method, shards = sync.build(way.sync), sharding.build(way.sharding)
    deal = shards.deal(levels)
    states = ShardedOptimizer.of(
        optimizer.build(way.optimizer),
        params,
        deal,
        rank=rank,
        holdings=sharding.holdings(deal, sharding.shapes_of(params), rank),
        differences=shards.differences,
    )
    pump: Any = SimpleNamespace(channel=SimpleNamespace(rank=rank, ranks=ranks, levels=levels))
    meets = "all" if method.loop is None else "island"
    replica = GradientReducer(params, exchange.build(way.exchange), pump, bucket_bytes=1 << 20, meets=meets)
    truth = {name: p.detach() for name, p in params.items()}
    apart = outer_loop_of(method.loop, params, truth, replica, None, bucket_bytes=1 << 20)
    progress = Progress(step=seed, updates=10 * seed + (rank if apart.fragments else 0))  # islands count their own
    scaling = LossScale.of(precision_of("fp16"))
    for _ in range(seed % 5):
        scaling.committed()
    plan, train = SimpleNamespace(residuals_on_resume=way.residuals), SimpleNamespace(optimizer="adamw")
    asked = SimpleNamespace(plan=plan, train=train)
    parts: Any = SimpleNamespace(module=module, cut=None, config=asked, base="")
    contents = contents_of(parts, progress, states, replica, apart, scaling, Watch())
    made = SimpleNamespace(module=module, states=states, replica=replica, apart=apart, progress=progress)
    fill(contents, seed, rank)
    return contents, made


@torch.no_grad()
def fill(contents: CheckpointContents, seed: int, rank: int) -> None:
    """Random numbers in place of all float tensors: of a rank in what is private to it, else the same on all."""
    for component in contents.components:
        for one in component.slices():
            if one.tensor.is_floating_point() and one.tensor.dim():
                own = rank + 1 if one.copies is SliceCopies.PRIVATE else 0
                key = sum(one.where.name.encode()) + 1000 * seed + 100_000 * own
                whole = torch.rand(one.where.shape, generator=torch.Generator().manual_seed(key))
                one.tensor.copy_(box(whole, one.where))


def run_of(way: Way, ranks: int, seed: int) -> list[tuple[CheckpointContents, SimpleNamespace]]:
    return [rank_of(way, rank, ranks, seed) for rank in range(ranks)]


def saved(way: Way, run: Sequence[tuple[CheckpointContents, SimpleNamespace]], folder: Path, keep: Keep) -> StateSource:
    """What all ranks save; ranks with disks of their own have copied them together."""
    ranks = len(run)
    pieces = [one.pieces(0, 1) if way.alone else one.pieces(rank, ranks) for rank, (one, _) in enumerate(run)]
    return keep(folder, unique(pieces), {"format": 2, **run[0][0].meta()})


def unique(ranks: Sequence[list[NamedSlice]]) -> list[list[NamedSlice]]:
    seen: set[Slice] = set()
    found: list[list[NamedSlice]] = []
    for pieces in ranks:
        found.append([(where, tensor) for where, tensor in pieces if where not in seen])
        seen.update(where for where, _ in pieces)
    return found


def state(contents: CheckpointContents) -> dict[str, Tensor]:
    """All state as it is now, each component's slices and metadata by name."""
    slices = {str(s.where): s.tensor.detach().clone() for one in contents.components for s in one.slices()}
    return {**slices, "meta": torch.tensor(list(repr(contents.meta()).encode()))}


def assert_same(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert sorted(got) == sorted(wanted)
    differ = [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)]
    assert differ == []


@pytest.mark.parametrize("keep", [on_disk, in_memory])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_rank_gives_it_takes_back_bit_for_bit(way: str, ranks: int, keep: Keep, tmp_path: Path) -> None:
    if WAYS[way].alone and ranks == 1:
        pytest.skip("one rank sees all of its disk")
    before = run_of(WAYS[way], ranks, seed=3)
    source = saved(WAYS[way], before, tmp_path, keep)
    wanted = [state(contents) for contents, _ in before]
    for rank in range(ranks):
        contents, _ = rank_of(WAYS[way], rank, ranks, seed=4)
        fresh = state(contents)
        assert not torch.equal(fresh["model/embed.weight"], wanted[rank]["model/embed.weight"])
        generator = {name: tensor for name, tensor in wanted[rank].items() if name.startswith("rng/")}
        assert contents.restore(source) == ""
        got = state(contents)
        stored = source.read_whole("rng/torch", rank)
        assert all(torch.equal(got[name], stored) for name in generator)
        assert_same(got, {**wanted[rank], **dict.fromkeys(generator, stored)})


@pytest.mark.parametrize("way", sorted(set(WAYS) - {"sharded_by_rank"}))
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_takes_back_what_all_share(way: str, ranks: int, tmp_path: Path) -> None:
    """Weights, rules' states, the loss scale and the progress are those of before; what is owed is owed again."""
    before = run_of(WAYS[way], 2, seed=3)
    source = saved(WAYS[way], before, tmp_path, on_disk)
    after = run_of(WAYS[way], ranks, seed=4)
    for contents, _ in after:
        contents.restore(source)
    assert after[0][1].progress.step == 3
    whole = saved(WAYS[way], before, tmp_path, in_memory)
    again = saved(WAYS[way], after, tmp_path, in_memory)
    for name in (n for n in whole.names() if whole.versions(n) == (REPLICATED,)):
        assert torch.equal(again.read_whole(name), whole.read_whole(name)), name
    owed = [n for n in whole.names() if n.startswith(("exchange/", "island/rounds/")) and n in again.names()]
    assert bool(owed) == (way in ("error_feedback", "islands"))
    for name in owed:
        sums = [sum(one.read_whole(name, version) for version in one.versions(name)) for one in (again, whole)]
        torch.testing.assert_close(*sums)
    for name in (n for n in whole.names() if n.startswith("optim/") and whole.versions(n) == (0, 1)):  # islands' mean
        mean = torch.stack([whole.read_whole(name, rank).double() for rank in range(2)]).mean(0).float()
        assert all(torch.equal(again.read_whole(name, rank), mean) for rank in range(ranks))


def test_rows_that_each_rank_stored_for_itself_are_for_as_many_ranks(tmp_path: Path) -> None:
    way = WAYS["sharded_by_rank"]
    source = saved(way, run_of(way, 2, seed=3), tmp_path, on_disk)
    for other, said in ((way, "resume with 2 ranks"), (WAYS["replicated"], "plan.sharding that it was saved")):
        contents, _ = rank_of(other, 0, 3, seed=4)
        refuses(contents, source, said)


def refuses(contents: CheckpointContents, source: StateSource, said: str) -> None:
    before = state(contents)
    with pytest.raises(CheckpointMismatch, match=said):
        contents.restore(source)
    assert_same(state(contents), before)


def less(source: StateSource, name: str, version: int) -> Memory:
    """The source without one tensor."""
    assert isinstance(source, Memory)
    return Memory((), source.values, {key: held for key, held in source.held.items() if key != (name, version)})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_source_that_lacks_a_tensor_is_refused_before_anything_moves(way: str, ranks: int, tmp_path: Path) -> None:
    """Each tensor in turn: either the run goes on without it, or says so and has changed nothing."""
    source = saved(WAYS[way], run_of(WAYS[way], 2, seed=3), tmp_path, in_memory)
    assert isinstance(source, Memory)
    refused = set()
    for name, version in sorted(source.held):
        contents, _ = rank_of(WAYS[way], 0, ranks, seed=4)
        before = state(contents)
        try:
            contents.restore(less(source, name, version))
        except CheckpointMismatch:
            refused.add(name.split("/")[0])
            assert_same(state(contents), before)
    assert "model" in refused
    if ranks == 2:
        assert "rng" in refused and refused & {"optim", "states"}


@pytest.mark.parametrize("way", sorted(set(WAYS) - {"sharded_by_rank"}))
def test_a_source_of_another_rule_or_model_is_refused_before_anything_moves(way: str, tmp_path: Path) -> None:
    momentum = Way(WAYS[way].sharding, WAYS[way].sync, WAYS[way].exchange, optimizer={"sgd": {"momentum": 0.9}})
    source = saved(momentum, run_of(momentum, 2, seed=3), tmp_path, in_memory)
    contents, _ = rank_of(WAYS[way], 0, 2, seed=4)
    refuses(contents, source, "trained with another optimizer")
    lamb = Way(WAYS[way].sharding, WAYS[way].sync, WAYS[way].exchange, optimizer={"lamb": {}})
    like = saved(WAYS[way], run_of(WAYS[way], 2, seed=3), tmp_path, in_memory)
    if WAYS[way].sharding == "none":  # lamb's slots have the same names and shapes
        refuses(rank_of(lamb, 0, 2, seed=4)[0], like, r"another optimizer: this run's is lamb, the saved one adamw\.")
    assert isinstance(source, Memory)
    source = saved(WAYS[way], run_of(WAYS[way], 2, seed=3), tmp_path, in_memory)
    assert isinstance(source, Memory)
    source.held["model/embed.weight", REPLICATED] = torch.zeros(8, 3)
    refuses(contents, source, "of another model")


@pytest.mark.parametrize("way", WAYS)
def test_names_lie_below_the_prefixes_of_their_component_alone(way: str) -> None:
    contents, _ = rank_of(WAYS[way], 0, 2, seed=3)
    for component in contents.components:
        for one in component.slices():
            longest = max((p for c in contents.components for p in c.prefixes if one.where.name.startswith(p)), key=len)
            assert longest in component.prefixes, one.where


@dataclass(frozen=True)
class Average(Stateful):
    """A new component that keeps state: this class, and its line among the components."""

    prefixes: ClassVar[tuple[str, ...]] = ("average/",)

    values: Mapping[str, Tensor]

    def slices(self) -> Iterator[StateSlice]:
        return (StateSlice.whole(f"average/{n}", tensor, SliceCopies.REPLICATED) for n, tensor in self.values.items())

    def check(self, source: StateSource) -> None:
        pass

    def restore(self, source: StateSource) -> str:
        for one in self.slices():
            one.tensor.copy_(source.read(one.where))
        return "the average goes on"


def with_average(contents: CheckpointContents, value: float) -> tuple[CheckpointContents, Average]:
    average = Average({"embed": torch.full((2, 2), value)})
    return CheckpointContents((*contents.components, average), contents.members, contents.holders), average


def test_a_new_component_is_saved_restored_and_missed(tmp_path: Path) -> None:
    plain = rank_of(WAYS["replicated"], 0, 1, seed=3)
    contents, _ = with_average(plain[0], 5.0)
    source = saved(WAYS["replicated"], [(contents, plain[1])], tmp_path, on_disk)
    again, average = with_average(rank_of(WAYS["replicated"], 0, 1, seed=4)[0], 6.0)
    assert again.restore(source) == "the average goes on"
    assert float(average.values["embed"].sum()) == 20.0
    refuses(rank_of(WAYS["replicated"], 0, 1, seed=4)[0], source, "1 not wanted .first: average/embed")
    before = saved(WAYS["replicated"], [plain], tmp_path, in_memory)
    refuses(with_average(plain[0], 6.0)[0], before, "1 missing .first: average/embed")


def test_two_components_of_one_prefix_are_refused() -> None:
    contents, _ = with_average(rank_of(WAYS["replicated"], 0, 1, seed=3)[0], 5.0)
    with pytest.raises(ValueError, match="one prefix"):
        with_average(contents, 6.0)
