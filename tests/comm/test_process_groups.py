"""How messages are put on a process group: what is received begins before what is sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gossamer.comm.channel.group import _prepared
from gossamer.comm.message import Collective, Message


@dataclass
class Recorded:
    """A process group that notes the calls, in place of gloo's."""

    calls: list[tuple[str, int, list[float]]] = field(default_factory=list)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> str:
        self.calls.append(("send", peer, tensors[0].flatten().tolist()))
        return f"sent to {peer}"

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> str:
        self.calls.append(("recv", peer, []))
        tensors[0].fill_(100.0 + peer)
        return f"received from {peer}"


def begun(message: Message, ranks: int, me: int) -> tuple[Recorded, Tensor, int]:
    """Return the calls, what arrives, and how many pieces of work are to be waited for."""
    group = Recorded()
    parts, begin = _prepared(message, tuple(range(10, 10 + ranks)), 10 + me)
    works = begin(group, 0)  # type: ignore[arg-type]
    return group, parts[0], len(works)


@pytest.mark.parametrize(("ranks", "me"), [(2, 0), (2, 1), (4, 2)])
def test_a_shuffle_asks_its_peers_before_it_sends(ranks: int, me: int) -> None:
    """Else a request follows a rank's own bytes, and the two directions of a slow link take turns."""
    rows = torch.arange(ranks * 3.0).view(ranks, 3)
    group, got, works = begun(Message((rows,), Collective.SHUFFLE), ranks, me)
    others = [peer for peer in range(ranks) if peer != me]
    assert [(what, peer) for what, peer, _ in group.calls] == [(w, p) for w in ("recv", "send") for p in others]
    assert [sent for what, _, sent in group.calls if what == "send"] == [rows[peer].tolist() for peer in others]
    assert got.tolist() == [rows[me].tolist() if k == me else [100.0 + k] * 3 for k in range(ranks)]
    assert works == 2 * (ranks - 1)


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_two_ranks_that_gather_ask_before_they_send(me: int, shape: tuple[int, ...]) -> None:
    mine = torch.full(shape, 7.0)
    group, got, works = begun(Message((mine,), Collective.GATHER), 2, me)
    assert [(what, peer) for what, peer, _ in group.calls] == [("recv", 1 - me), ("send", 1 - me)] and works == 2
    wanted = [torch.full(shape, 100.0 + k) if k != me else mine for k in range(2)]
    assert torch.equal(got, torch.stack(wanted))


@pytest.mark.parametrize("combine", [Collective.SHUFFLE, Collective.GATHER])
def test_an_empty_part_moves_nothing(combine: Collective) -> None:
    group, _, works = begun(Message((torch.empty(2, 0),), combine), 2, 0)
    assert group.calls == [] and works == 0
