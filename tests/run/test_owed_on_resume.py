"""What error feedback owes is sent after a resume too, on other ranks and by exchanges other than those that owe it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from gossamer import exchange as exchange_methods
from gossamer.comm.channel.local import LocalChannel
from gossamer.comm.comm_thread import CommThread
from gossamer.comm.message import ProcessGroups
from gossamer.run.checkpoint.exchange_state import SavedExchanges
from gossamer.sync import GradientReducer
from run.test_trainer import records

FEEDBACK, EXACT = {"error_feedback": {"two_shot": "int8"}}, {"two_shot": "int8"}
LOW_RANK = {"error_feedback": {"powersgd": {"rank": 1}}}
DEEPER = {"hierarchical": {"inter": FEEDBACK}}
SOME = {"table": FEEDBACK, "head": "dense"}  # by parameter
OWED = {"table": torch.arange(40.0).view(8, 5) - 7, "head": torch.ones(6)}


class Saved:
    """What two ranks owe of some parameters, as the checkpoint of a run with error feedback holds it."""

    def __init__(self, names: Sequence[str], scales: Sequence[float] = (1.0, -3.0)) -> None:
        self.meta = {"ranks": len(scales)}
        self.held = {f"exchange/e@{n}": [OWED[n] * scale for scale in scales] for n in names}

    def names(self) -> frozenset[str]:
        return frozenset(self.held)

    def versions(self, name: str) -> tuple[int, ...]:
        return tuple(range(len(self.held.get(name, ()))))

    def read_whole(self, name: str, version: int) -> Tensor:
        return self.held[name][version]

    def owed(self, name: str) -> Tensor:
        return torch.stack(self.held[f"exchange/e@{name}"]).sum(0)


@pytest.fixture
def pump() -> Iterator[CommThread]:
    (channel,) = LocalChannel.world(1, ProcessGroups.islands(((0,),)))
    thread = CommThread(channel)
    yield thread
    thread.close()


def resumed(pump: CommThread, written: Any, saved: Saved, ranks: int) -> tuple[list[dict[str, Tensor]], str]:
    """What each of so many ranks keeps after the resume, and what the first one tells."""
    kept, told = list[dict[str, Tensor]](), list[str]()
    for rank in range(ranks):
        params = {"table": nn.Parameter(torch.zeros(8, 5)), "head": nn.Parameter(torch.zeros(6))}
        exchanges = {n: exchange_methods.build(written[n] if written is SOME else written) for n in params}
        replica = GradientReducer(params, exchanges, pump, bucket_bytes=1 << 20)
        place: Any = SimpleNamespace(rank=rank, ranks=ranks)
        source: Any = saved
        told.append(SavedExchanges(replica, place, "redistribute").restore(source))
        kept.append(replica.states())
        replica.close()
    assert len(set(told)) == 1
    return kept, told[0]


def sums(kept: list[dict[str, Tensor]], name: str) -> Tensor:
    there = [t for states in kept for n, t in states.items() if n.endswith(f"e@{name}")]
    return torch.stack(there).sum(0)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("scales", [(1.0, -3.0), (2.0, 2.0)], ids=["unlike", "alike"])
@pytest.mark.parametrize("written", [FEEDBACK, LOW_RANK, DEEPER, SOME], ids=["same", "low rank", "deeper", "some"])
def test_what_is_owed_goes_on_in_whatever_error_feedback_there_is(
    pump: CommThread, written: Any, scales: tuple[float, float], ranks: int
) -> None:
    """Each rank goes on with its own, other ranks with parts of the sum; factors of another method start anew."""
    saved = Saved(["table"], scales)
    kept, told = resumed(pump, written, saved, ranks)
    torch.testing.assert_close(sums(kept, "table"), saved.owed("table"))
    if ranks == 2:
        for mine, theirs in zip(kept, saved.held["exchange/e@table"], strict=True):
            torch.testing.assert_close(sums([mine], "table"), theirs)
    if written is not SOME:
        assert not sums(kept, "head").any(), "nothing was owed of it"
    assert ("merged" in told) == (ranks == 3) and "dropped" not in told


def test_what_no_exchange_sends_any_more_is_said(pump: CommThread) -> None:
    kept, told = resumed(pump, EXACT, Saved(["table", "head"]), 3)
    assert not any(kept)
    assert "exchange residuals of 2 parameters (head, table) were dropped" in told
    assert resumed(pump, SOME, Saved(["table", "head"]), 2)[1].startswith("exchange residuals of 1 parameter (head)")


def test_nothing_is_said_of_residuals_where_there_were_none(pump: CommThread) -> None:
    assert resumed(pump, FEEDBACK, Saved([]), 3)[1] == ""


def test_a_choice_on_other_ranks_gives_feedback_to_what_is_owed(pool, tmp_path: Path) -> None:
    """Between links that need no compression `auto` takes exact exchanges, and none of them would send a residual."""
    before = {"plan": {"exchange": {"error_feedback": {"topk": {"fraction": 0.05}}}}}
    pool.run("run.jobs:train", 2, folder=str(tmp_path), steps=8, until=4, sections=before)
    runs = pool.run("run.jobs:train", 3, folder=str(tmp_path), steps=8, resume=True, hosts=3)
    assert len({r["digest"] for r in runs}) == 1
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text())
    said = [event["message"] for event in records(tmp_path, "event")]
    assert "error_feedback" in str(plan["exchange"]) and "sends what was owed before" in plan["reasons"]["exchange"]
    assert any("residuals were merged" in one for one in said) and not any("dropped" in one for one in said)
