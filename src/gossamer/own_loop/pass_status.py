"""Status messages of the backward passes: each rank's row, gathered by the calling thread on a channel of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.comm.channel import Channel, Pending
from gossamer.comm.message import Collective, Message
from gossamer.own_loop.backward_pass import BackwardPass
from gossamer.own_loop.pass_inputs import PassInputs
from gossamer.own_loop.process_group import LoopGroup
from gossamer.own_loop.status_rows import LOSS, TOLD, StatusRow, StatusRows
from gossamer.spec.errors import PeerLost


class PassStatus:
    """The exchange of status rows between all ranks of a loop. `last`: the rows of the last pass."""

    def __init__(self, words: Channel, party: LoopGroup, hand: PassInputs) -> None:
        self._words, self._party, self._hand = words, party, hand
        self.last: StatusRows | None = None

    def start(self, row: StatusRow) -> Pending:
        """Send this rank's row of a pass."""
        return self._words.start(Message((row.tensor(),), Collective.GATHER))

    def start_marks(self, marks: Tensor) -> Pending:
        """Send marks, of which each is set if any rank has set it."""
        return self._words.start(Message((marks,), Collective.MAX))

    def rows(self, one: BackwardPass) -> StatusRows:
        """Return all ranks' status rows of this pass. Waits for the last one; raises if they are inconsistent."""
        if one.rows is None:
            with self._party.clock.stopped():
                (told,) = one.weighing.wait()
            one.rows = StatusRows.of(told, self._party.rank, one.row)
            one.rows.check()
            if one.deferred is not None:
                one.deferred.judge(one.rows.beside[:, 1 : 1 + TOLD])
            self._hand.learn(one.row.counted, one.rows.kind)
            self.last = one.rows
        return one.rows

    def weight(self, one: BackwardPass) -> float:
        """Return the weight of a gradient of a group, whose sum over ranks is averaged with equal weights."""
        rows = self.rows(one)
        return rows.share * self._party.ranks * rows.factor

    @contextmanager
    def answered(self, doing: str) -> Iterator[None]:
        """Convert a PeerLost raised inside into one that names the missing ranks and `doing`."""
        try:
            yield
        except PeerLost as error:
            raise self._party.lost(error, doing) from None

    def gathered(self, row: StatusRow, doing: str) -> StatusRows:
        """All-gather a status row outside of the passes and return all ranks' rows. Raises as a pass does."""
        with self.answered(doing), self._party.clock.stopped():
            (told,) = self.start(row).wait()
        rows = StatusRows.of(told, self._party.rank, row)
        rows.check()
        return rows

    def whole(self, loss: Tensor | float, serial: int) -> Tensor | float:
        """Return the loss of the global batch from the ranks' own losses of the last pass. All ranks must call it.

        `serial`: number of that pass.
        """
        mine = float(loss)
        rows = self.gathered(StatusRow(LOSS, serial, beside=(mine,)), "a closure of optimizer.step()")
        shares, factor = (self.last.shares, self.last.factor) if self.last is not None else (rows.shares, 1.0)
        values = torch.where(shares > 0, rows.beside[:, 0], 0.0)
        value = float((values * shares).sum()) * factor
        return torch.full_like(loss.detach(), value) if isinstance(loss, Tensor) else value
