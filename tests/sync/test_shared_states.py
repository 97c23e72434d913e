"""What exchanges know of the mean is alike on all ranks of it: a resume goes on with it there, or starts it anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer.comm.channel import Channel
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.exchange import is_residual
from gossamer.run.checkpoint.exchange_state import SavedExchanges
from gossamer.spec.mesh import Mesh
from gossamer.sync import GradientReducer, StepContext, StepVote

SHAPES = {"table": (8, 6), "head": (6,)}
TOPK = {"topk": {"fraction": 0.3}}
SHARED: list[Any] = [
    {"ef21": TOPK},
    {"ef21_sgdm": {"inner": TOPK}},
    {"econtrol": {"inner": TOPK}},
    {"delta_reference": TOPK},
    {"momentum": {"inner": {"error_feedback": {"inner": TOPK, "track_lr": False}}}},
    {"error_feedback": {"acp_sgd": {"rank": 1}}},
]
FOUR, STAGES = ProcessGroups.flat(4), ProcessGroups.of(Mesh(replicas=2, stages=((0,), (1,))))
PAIRS, OTHERS = ProcessGroups.islands([[0, 1], [2, 3]]), ProcessGroups.islands([[0, 2], [1, 3]])


@dataclass(frozen=True)
class Stored:
    """The states that ranks have saved, of which one disk holds those of `ranks`."""

    saved: Sequence[dict[str, Tensor]]
    ranks: Collection[int]

    @property
    def meta(self) -> dict[str, Any]:
        return {"ranks": len(self.saved)}

    def names(self) -> frozenset[str]:
        return frozenset(name for rank in self.ranks for name in self.saved[rank])

    def versions(self, name: str) -> tuple[int, ...]:
        return tuple(sorted(rank for rank in self.ranks if name in self.saved[rank]))

    def read_whole(self, name: str, version: int) -> Tensor:
        return self.saved[version][name].clone()


@dataclass(frozen=True)
class Run:
    """Steps of ranks in these groups, averaged at a level; with two stages, of one parameter each.

    `last`: the level from step 1 on, where it is another one.
    """

    written: Any
    levels: ProcessGroups
    level: str = "all"
    last: str = ""

    def __call__(self, steps: range, disks: Sequence[Stored | None]) -> list[dict[str, Any]]:
        def on(channel: Channel) -> dict[str, Any]:
            pump = CommThread(channel)
            try:
                return self._on(pump, steps, disks[pump.channel.rank])
            finally:
                pump.close()

        with ThreadPoolExecutor(len(disks)) as threads:
            return list(threads.map(on, LocalChannel.world(len(disks), self.levels, patience_s=30.0)))

    def _on(self, pump: CommThread, steps: range, disk: Any) -> dict[str, Any]:
        rank = pump.channel.rank
        stages = [group[0] for group in self.levels.groups["all"]]
        mine = list(SHAPES) if len(stages) == 1 else [list(SHAPES)[rank % len(stages)]]
        params = {name: nn.Parameter(torch.zeros(SHAPES[name])) for name in mine}
        exchange = exchange_methods.build(self.written)
        replica = GradientReducer(params, exchange, pump, bucket_bytes=1 << 20, meets=self.level)
        place: Any = SimpleNamespace(rank=rank, ranks=replica.ranks)
        contents = SavedExchanges(replica, place, "redistribute")
        told = "" if disk is None else contents.restore(disk)
        begun, means = {name: t.clone() for name, t in replica.states().items()}, []
        for step in steps:
            replica.open(StepContext(step, 0, 1.0, 1.0, level=(step and self.last) or self.level))
            replica.watch()
            rng = torch.Generator().manual_seed(100 * step + rank)
            sum((p * torch.randn(p.shape, generator=rng)).sum() for p in params.values()).backward()
            replica.reduce()
            replica.agree(StepVote(0.0))
            means.append({name: one.clone() for name, one in replica.gradients().items()})
            replica.commit()
        saved = {one.where.name: one.tensor.clone() for one in contents.slices()}
        replica.close()
        return {"told": told, "begun": begun, "means": means, "saved": saved}


def resumed(before: Run, after: Run, seen: Callable[[int], Collection[int]] = lambda _: range(4)) -> list[Any]:
    """A resume on four ranks: rank r reads a disk that holds the states of the ranks `seen(r)`."""
    saved = [one["saved"] for one in before(range(3), [None] * 4)]
    return after(range(3, 5), [Stored(saved, seen(rank)) for rank in range(4)])


def check_alike(ranks: Sequence[Any], groups: Sequence[Sequence[int]]) -> None:
    """All ranks of a group have one mean, bit for bit, in every step."""
    for first, *others in groups:
        for rank in others:
            for mine, theirs in zip(ranks[rank]["means"], ranks[first]["means"], strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def goes_on(rank: Any) -> bool:
    """Whether anything but a residual is other than in the first step."""
    begun = {n: t for n, t in rank["begun"].items() if not is_residual(n)}
    assert begun, "nothing but residuals: this proves nothing"
    return any(t.any() for n, t in begun.items() if n.partition("@")[0].rpartition("/")[2] not in ("p", "q"))


@pytest.mark.parametrize("written", SHARED, ids=str)
def test_a_resume_on_the_same_ranks_goes_on(written: Any) -> None:
    """Each on a disk of its own too: no disk then holds the states of all."""
    straight = Run(written, FOUR)(range(5), [None] * 4)
    for seen in (lambda _: range(4), lambda rank: (rank,)):
        ranks = resumed(Run(written, FOUR), Run(written, FOUR), seen)
        check_alike(ranks, FOUR.groups["all"])
        for one, whole in zip(ranks, straight, strict=True):
            assert one["told"] == "" and goes_on(one)
            for mine, theirs in zip(one["means"], whole["means"][3:], strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("written", SHARED, ids=str)
def test_where_a_rank_has_none_all_start_anew(written: Any) -> None:
    """The disk of ranks 2 and 3 was lost, and has a copy of the other one."""
    ranks = resumed(Run(written, FOUR), Run(written, FOUR), lambda _: (0, 1))
    check_alike(ranks, FOUR.groups["all"])
    assert not any(map(goes_on, ranks))
    assert all("starts anew on all ranks" in one["told"] for one in ranks)


@pytest.mark.parametrize(
    ("before", "after"),
    [((STAGES, "all"), (FOUR, "all")), ((PAIRS, "island"), (FOUR, "all")), ((PAIRS, "island"), (OTHERS, "island"))],
    ids=["stages to whole models", "islands to all", "other islands"],
)
@pytest.mark.parametrize("written", SHARED, ids=str)
def test_where_other_ranks_make_the_mean_all_start_anew(written: Any, before: Any, after: Any) -> None:
    ranks = resumed(Run(written, *before), Run(written, *after))
    check_alike(ranks, after[0].groups[after[1]])
    assert not any(map(goes_on, ranks))
    assert all("starts anew on all ranks" in one["told"] for one in ranks)


def test_the_same_islands_go_on() -> None:
    ranks = resumed(Run({"ef21": TOPK}, PAIRS, "island"), Run({"ef21": TOPK}, PAIRS, "island"))
    check_alike(ranks, PAIRS.groups["island"])
    assert all(goes_on(one) and one["told"] == "" for one in ranks)


@pytest.mark.parametrize("level", ["all", "island"])
def test_on_other_ranks_what_one_group_knew_goes_on(level: str) -> None:
    """What two islands knew is of two means."""
    saved = [one["saved"] for one in Run({"ef21": TOPK}, PAIRS, level)(range(3), [None] * 4)]
    ranks = Run({"ef21": TOPK}, ProcessGroups.flat(3))(range(3, 5), [Stored(saved, range(4))] * 3)
    check_alike(ranks, [range(3)])
    assert {goes_on(one) for one in ranks} == {level == "all"}
    assert all(("starts anew" in one["told"]) == (level == "island") for one in ranks)


@pytest.mark.parametrize("levels", [FOUR, STAGES, PAIRS], ids=["whole models", "stages", "islands"])
def test_what_is_owed_is_a_part_of_the_mean_of_those_who_average(levels: ProcessGroups) -> None:
    """Mean and residuals of a step are the mean of what the ranks of a stage gave: others have no part in it."""
    ranks = Run({"error_feedback": TOPK}, levels)(range(1), [None] * 4)
    for group in levels.groups["all"]:
        given = {rank: torch.Generator().manual_seed(rank) for rank in group}
        for name, mean in ranks[group[0]]["means"][0].items():
            wanted = sum(torch.randn(SHAPES[name], generator=rng) for rng in given.values()) / len(group)
            owed = [ranks[rank]["saved"][f"exchange/e@{name}"] for rank in group]
            torch.testing.assert_close(mean + torch.stack(owed).sum(0), wanted)
            assert torch.stack(owed).any(), "nothing is owed: this proves nothing"


def test_what_is_owed_when_ranks_part_is_paid_in_their_first_step_alone() -> None:
    """So after a warm-up: the steps of both have moved what gradients say, in the mean of all ranks."""
    alone = ProcessGroups.islands([[0], [1], [2], [3]])
    ranks = Run({"error_feedback": TOPK}, alone, last="island")(range(3), [None] * 4)
    exact = Run("dense", alone, last="island")(range(3), [None] * 4)
    for name in SHAPES:
        moved, wanted = (
            [torch.stack([one["means"][step][name] for one in run]).mean(0) for step in range(3)]
            for run in (ranks, exact)
        )
        assert not torch.allclose(moved[0], wanted[0], atol=1e-3), "nothing is owed: this proves nothing"
        torch.testing.assert_close(moved[0] + moved[1], wanted[0] + wanted[1])
        assert torch.equal(moved[2], wanted[2]), "and only once"
