"""A large tensor in several buckets: the same gradients bit for bit, and residuals that any other parts take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer.comm.bucket import divided, divided_as, partition
from gossamer.comm.channel import Channel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import Exchange
from gossamer.recipe import ParameterRules
from gossamer.recipe.plan_methods import PlanMethods
from gossamer.run.checkpoint.exchange_state import SavedExchanges
from gossamer.spec.errors import BadInput
from gossamer.spec.parameter_rules import lines
from gossamer.spec.plan import Plan
from gossamer.spec.row_range import RowRange, parts_in, parts_of, whole_of
from gossamer.sync import GradientReducer, StepContext, StepVote

FEEDBACK = {"error_feedback": {"two_shot": "int4"}}
PARTS = (("table[6:10]",), ("head", "bias"), ("table[0:3]",), ("table[3:6]",))  # in any order


class Lopsided(nn.Module):
    """A table of 90% of all numbers, and two small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 36))
        self.head = nn.Parameter(torch.randn(1, 36))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table[ids] * self.head).tanh().sum() + (self.bias**2).sum() + self.bias.sum()


def lopsided() -> Lopsided:
    """The same on every rank, whose threads share one generator."""
    module = Lopsided()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=rng))
    return module


def replica_of(pump: CommThread, exchange: Any, buckets: Sequence[Sequence[str]]) -> tuple[nn.Module, GradientReducer]:
    module = lopsided()
    exchanges: Exchange | Mapping[str, Exchange] = exchange_methods.build(exchange)
    params = dict(module.named_parameters())
    return module, GradientReducer(params, exchanges, pump, bucket_bytes=1 << 20, buckets=buckets)


@pytest.fixture
def alone() -> Iterator[CommThread]:
    (channel,) = LocalChannel.world(1)
    pump = CommThread(channel)
    yield pump
    pump.close()


def stepped(module: nn.Module, replica: GradientReducer, rank: int, steps: range, idle: int = -1) -> list[Any]:
    """The mean gradients, norm and idle parameters of each step; in step `idle` nothing has a gradient."""
    found = []
    for step in steps:
        replica.open(StepContext(step, 0, 1.0, 1.0 + rank))
        replica.watch()
        if step != idle:
            ids = torch.randint(0, 10, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
            module(ids).backward()
        replica.reduce()
        agreed = replica.agree(StepVote(0.0))
        gradients = {n: g.clone() for n, g in replica.gradients().items()}
        found.append((gradients, agreed.norm, agreed.idle))
        replica.commit()
    return found


def everywhere(run: Any, islands: tuple[tuple[int, ...], ...] = ()) -> list[Any]:
    levels = ProcessGroups.islands(islands) if islands else ProcessGroups.flat(3)

    def on(channel: Channel) -> Any:
        pump = CommThread(channel)
        try:
            return run(pump)
        finally:
            pump.close()

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(on, LocalChannel.world(3, levels, patience_s=30.0)))


def same(a: Any, b: Any) -> None:
    for (mine, norm, idle), (other, other_norm, other_idle) in zip(a, b, strict=True):
        assert list(mine) == list(other) and idle == other_idle
        assert norm == pytest.approx(other_norm, rel=1e-6)
        for name in mine:
            assert torch.equal(mine[name], other[name]), name


@pytest.mark.parametrize("exchange", ["dense", {"error_feedback": {"inner": "dense"}}])
def test_divided_gradients_are_the_same_bit_for_bit(exchange: Any) -> None:
    """On ranks of unequal weight; autograd writes each gradient once, and it is one tensor before and after.

    Of three ranks, a two-shot exchange adds in an order that depends on where a number lies in its bucket.
    """

    def run(pump: CommThread) -> Any:
        kept = []
        for buckets in ((), PARTS):
            module, replica = replica_of(pump, exchange, buckets)
            assert len(replica.layouts) == (4 if buckets else 1)
            kept.append(stepped(module, replica, pump.channel.rank, range(4), idle=2))
            assert module.table.grad is not None and module.table.grad.is_contiguous()
            assert torch.equal(module.table.grad, kept[-1][-1][0]["table"])
        return kept

    for whole, parts in everywhere(run):
        same(whole, parts)
        assert parts[2][2] == {"table", "head", "bias"}, "no part had a gradient on any rank"


def test_each_part_may_have_an_exchange_of_its_own() -> None:
    """Parts that are coded are near the mean, the part that is not is the mean."""
    rules = ParameterRules.read([(r"^(table\[0:3\])$", "all", FEEDBACK), (".*", "all", "dense")], parts=parts_in(PARTS))

    def run(pump: CommThread) -> Any:
        module = lopsided()
        params = dict(module.named_parameters())
        own = GradientReducer(params, rules.by_name(params), pump, bucket_bytes=64, buckets=PARTS)
        plain_module, plain = replica_of(pump, "dense", ())
        a = stepped(module, own, pump.channel.rank, range(2))
        b = stepped(plain_module, plain, pump.channel.rank, range(2))
        return a[-1][0]["table"], b[-1][0]["table"], own.states()

    for mine, mean, states in everywhere(run):
        assert torch.equal(mine[3:], mean[3:]) and not torch.equal(mine[:3], mean[:3])
        (residual,) = states.values()
        assert list(states) == ["e@table"] and residual.shape == (10, 36)
        assert residual[:3].any() and not residual[3:].any()


@pytest.mark.parametrize("then", [PARTS, (), (("table[0:5]",), ("table[5:10]",))], ids=["same", "whole", "other"])
def test_residuals_go_on_in_the_same_rows_whatever_the_parts(then: Sequence[Sequence[str]]) -> None:
    """Saved and restored, or taken over in mid-run: what was owed to each row is owed to it."""

    def run(pump: CommThread) -> Any:
        module, replica = replica_of(pump, FEEDBACK, PARTS)
        stepped(module, replica, pump.channel.rank, range(3))
        saved = {n: t.clone() for n, t in replica.states().items()}
        assert sorted(saved) == ["e@bias", "e@head", "e@table"] and saved["e@table"].any()
        other, resumed = replica_of(pump, FEEDBACK, then)
        resumed.restore(saved)
        restored = {n: t.clone() for n, t in resumed.states().items()}
        replica.adopt({n: exchange_methods.build(FEEDBACK) for n in replica.names}, bucket_bytes=1 << 20, buckets=then)
        adopted = {n: t.clone() for n, t in replica.states().items()}
        ahead = stepped(module, replica, pump.channel.rank, range(3, 6))
        other.load_state_dict(module.state_dict())
        return saved, restored, adopted, ahead, stepped(other, resumed, pump.channel.rank, range(3, 6))

    for saved, restored, adopted, ahead, resumed in everywhere(run):
        for found in (restored, adopted):
            assert sorted(found) == sorted(saved)
            assert all(torch.equal(found[n], saved[n]) for n in saved)
        same(ahead, resumed)


NESTED = {"hierarchical": {"inter": FEEDBACK}}


@pytest.mark.parametrize("then", [PARTS, ()], ids=["parts", "whole"])
def test_residuals_of_parts_go_on_where_their_exchanges_keep_them_at_other_depths(
    then: Sequence[Sequence[str]],
) -> None:
    """One part keeps its residual as e, the others as 0/e; then it is the other way around, or one exchange for all."""

    def of(first: Any, rest: Any) -> dict[str, Exchange]:
        one, other = exchange_methods.build(first), exchange_methods.build(rest)
        return {**dict.fromkeys(("table", "head", "bias", "table[3:6]", "table[6:10]"), other), "table[0:3]": one}

    def owed(replica: GradientReducer) -> Tensor:
        return sum((t for n, t in replica.states().items() if n.endswith("e@table")), torch.zeros(10, 36))

    def run(pump: CommThread) -> Any:
        module = lopsided()
        params = dict(module.named_parameters())
        replica = GradientReducer(params, of(FEEDBACK, NESTED), pump, bucket_bytes=1 << 20, buckets=PARTS)
        stepped(module, replica, pump.channel.rank, range(3))
        before = owed(replica).clone()
        replica.adopt(of(NESTED, FEEDBACK if then else NESTED), bucket_bytes=1 << 20, buckets=then)
        return before, owed(replica)

    for before, after in everywhere(run, islands=((0,), (1,), (2,))):
        assert before[:3].any() and before[3:].any()
        assert torch.equal(before, after)


class Stored:
    """The exchange states of one rank, as a checkpoint has them."""

    meta: ClassVar[dict[str, Any]] = {"ranks": 1}

    def __init__(self, saved: SavedExchanges) -> None:
        self.states = {one.where.name: one.tensor.clone() for one in saved.slices()}

    def names(self) -> frozenset[str]:
        return frozenset(self.states)

    def versions(self, name: str) -> tuple[int, ...]:
        return (0,) if name in self.states else ()

    def read_whole(self, name: str, version: int) -> Tensor:
        return self.states[name]


def test_a_checkpoint_is_restored_to_other_parts_with_what_is_owed_and_factors_that_start_anew(
    alone: CommThread,
) -> None:
    written = {"error_feedback": {"powersgd": {"rank": 1}}}
    module, before = replica_of(alone, written, PARTS)
    stepped(module, before, 0, range(2))
    given: Any = SimpleNamespace(rank=0, ranks=1)
    saved = Stored(SavedExchanges(before, given, "redistribute"))
    assert any("@table[" in name for name in saved.states), "factors are those of a part"
    for then in (PARTS, (("table[0:5]",), ("table[5:10]",)), ()):
        _, after = replica_of(alone, written, then)
        fresh = after.states()
        source: Any = saved
        assert SavedExchanges(after, given, "redistribute").restore(source) == ""
        for name, tensor in after.states().items():
            kept = saved.states.get(f"exchange/{name}")
            assert torch.equal(tensor, fresh[name] if kept is None else kept), name
        assert torch.equal(after.states()["e@table"], saved.states["exchange/e@table"])


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ((("table[0:3]",), ("table[4:10]",)), r"wanted parts of table .*\[0:3\], \[4:10\] of 10"),
        ((("table[0:3]",), ("table[3:11]",)), r"of 10"),
        ((("table[0:3]",),), r"of 10"),
        ((("table[0:5]", "head"), ("table[5:10]",)), r"a bucket of 2 tensors"),
        ((("table[0:5]",), ("table[2:10]",)), r"of 10"),
    ],
)
def test_parts_that_are_not_all_rows_once_are_refused(alone: CommThread, buckets: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        replica_of(alone, "dense", buckets)


def test_a_residual_cannot_be_dropped_with_the_exchange_of_one_part(alone: CommThread) -> None:
    _, replica = replica_of(alone, FEEDBACK, PARTS)
    exchanges = {n: exchange_methods.build(FEEDBACK) for n in (*replica.names, "table[0:3]", "table[3:6]")}
    with pytest.raises(BadInput, match="error feedback for table"):
        replica.adopt(
            {**exchanges, "table[6:10]": exchange_methods.build("dense")}, bucket_bytes=1 << 20, buckets=PARTS
        )


def test_gradients_that_are_given_back_are_not_divided(alone: CommThread) -> None:
    params, dense = dict(lopsided().named_parameters()), exchange_methods.build("dense")
    with pytest.raises(BadInput, match="sharded or given back"):
        GradientReducer(params, dense, alone, bucket_bytes=64, buckets=PARTS, gives_back=True)


def test_a_rule_for_a_parameter_is_one_for_its_parts() -> None:
    plan = Plan(rows=(1,), microbatches=(1,), exchange=[("table$", "all", FEEDBACK), (".*", "all", "dense")])
    methods = PlanMethods.of(plan.model_copy(update={"buckets": PARTS}))
    found = methods.exchange.by_name(["table", "head", "bias"])
    assert sorted(found) == ["bias", "head", "table", "table[0:3]", "table[3:6]", "table[6:10]"]
    assert {name: one.traits.lossless for name, one in found.items()} == {n: not n.startswith("table") for n in found}


def test_a_rule_for_rows_that_no_bucket_has_is_refused_with_the_reason() -> None:
    written = [(r"^(table\[0:3\])$", "all", FEEDBACK), (".*", "all", "dense")]
    for parts in ((), ("table[0:5]", "table[5:10]")):
        with pytest.raises(BadInput, match=r"another plan\.buckets"):
            ParameterRules.read(written, parts=parts).by_name(["table", "head"])


@pytest.mark.parametrize(
    ("pattern", "matches", "of_part"),
    [
        ("[0-9]", False, False),
        ("^(?!table$)", False, False),
        ("^table$", True, True),
        (r"table(?!\.)", True, True),
        (r"^(table\[0:3\])$", False, True),
        (r"\[0:", False, True),
    ],
)
def test_a_rule_speaks_of_parts_alone_where_it_names_their_rows(pattern: str, matches: bool, of_part: bool) -> None:
    (rule,) = lines([(pattern, "all", "dense")], key="plan.exchange")
    assert (rule.matches("table"), rule.matches("table[0:3]")) == (matches, of_part)


def test_names_of_parts_are_read_as_they_are_written() -> None:
    for rows, count in ((10, 3), (2, 5), (7, 7), (1, 1)):
        found = parts_of("a.b[0]", rows, count)
        assert len(found) == min(rows, count)
        assert [p.start for p in found] == [0, *(p.stop for p in found)][:-1] and found[-1].stop == rows
        assert all(RowRange.read(p.name) == p and whole_of(p.name) == "a.b[0]" for p in found)
    assert RowRange.read("a.b[0]") is None and whole_of("a.weight") == "a.weight"


def test_only_what_is_as_large_as_two_buckets_is_divided() -> None:
    params = {
        "table": torch.empty(1000, 8),
        "w": torch.empty(10, 8),
        "vector": torch.empty(5000),
        "one": torch.empty(()),
    }
    params["wide"] = torch.empty(1, 5000)  # a single row
    found = divided(params, bucket_bytes=8192)
    assert list(found)[:3] == ["table[0:333]", "table[333:666]", "table[666:1000]"]
    assert [n for n in found if n.startswith("vector")] == ["vector[0:2500]", "vector[2500:5000]"]
    assert {"w", "one", "wide"} < set(found)
    assert sum(t.numel() for t in found.values()) == sum(t.numel() for t in params.values())
    cut = partition(found, bucket_bytes=8192, at_least=1)
    assert max(one.nbytes for one in cut) == 4 * 5000, "of the single row alone"
    named = [[e.name] for one in cut for e in one.entries if e.name not in params]
    assert list(divided_as(params, named)) == list(found)
