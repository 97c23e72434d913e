"""Point-to-point transfers of one pipeline step: boundary tensors, their gradients, and the message order.

Between two ranks all messages follow the order of their action lists. Receives are submitted some computations before
they are needed, so that a message can arrive while this rank computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.comm.comm_thread import CommThread, P2PStep
from gossamer.model.split.dataflow import CallOutput
from gossamer.p2p import TensorRoute, TensorSpec
from gossamer.pipeline.stage_links import StageLinks, way_of
from gossamer.spec.action import Action, Op

AHEAD = 2  # a receive may start so many computations before it is needed
_SENDS, _RECEIVES = (Op.SEND_F, Op.SEND_B), (Op.RECV_F, Op.RECV_B)
_FORWARD = (Op.SEND_F, Op.RECV_F)


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor that a stage sends to the next stage; its gradient comes back where `needs_grad`."""

    value: CallOutput
    form: TensorSpec
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """The tensors that a stage receives and sends per micro-batch, in message order."""

    receives: tuple[StageTensor, ...] = ()
    sends: tuple[StageTensor, ...] = ()

    def edges(self, op: Op) -> tuple[StageTensor, ...]:
        """Return the tensors that action `op` of the stage sends or receives."""
        edges = self.sends if op in (Op.SEND_F, Op.RECV_B) else self.receives
        return edges if op in _FORWARD else tuple(edge for edge in edges if edge.needs_grad)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The transfer of one tensor in one action: its route, and the number of its message in the step."""

    edge: StageTensor
    passage: TensorRoute
    job: int


class StepP2P:
    """The point-to-point transfers of one rank in one step.

    `links[s, b]` is the link for micro-batch b from stage s to s + 1, where these are on two ranks; `boundaries[b][s]`
    is the boundary of stage s for micro-batch b; `at` is (seed, step).
    """

    def __init__(
        self,
        pump: CommThread,
        links: StageLinks,
        row: Sequence[Action],
        boundaries: Mapping[int, Mapping[int, StageBoundary]],
        at: tuple[int, int],
    ) -> None:
        self._lanes = _lanes(links, row, boundaries, at)
        self._links = links
        self._under: P2PStep | None = None
        self._inbox: dict[tuple[int, int], dict[CallOutput, Tensor]] = {}
        self._outbox: dict[tuple[int, int], dict[CallOutput, Tensor]] = {}
        self._back: dict[
            tuple[int, int], dict[CallOutput, Tensor]
        ] = {}  # gradients of the inputs of a stage, to be sent
        self._gradients: dict[tuple[int, int], dict[CallOutput, Tensor]] = {}  # of the outputs of a stage
        if count := sum(len(lanes) for lanes in self._lanes.values()):
            self._under = pump.transfers(count)
            for action, lanes in self._lanes.items():
                if action.op in _RECEIVES:
                    for lane in lanes:
                        there = action.op is Op.RECV_F
                        way = lane.passage.receive() if there else lane.passage.receive_gradient()
                        self._under.submit(lane.job, way)

    def received(self, stage: int, batch: int) -> dict[CallOutput, Tensor]:
        """Return, and drop, the tensors that the previous stage has sent for the micro-batch."""
        return self._inbox.pop((stage, batch), {})

    def made(self, stage: int, batch: int, sent: Mapping[CallOutput, Tensor]) -> None:
        """Take the stage's output `sent` after its forward, for the next stage."""
        box, to = (self._outbox, stage) if (stage, batch) in self._links else (self._inbox, stage + 1)
        if sent:
            box[to, batch] = dict(sent)

    def gradients(self, stage: int, batch: int) -> dict[CallOutput, Tensor]:
        """Return, and drop, the gradients of the tensors that the stage has sent for the micro-batch."""
        return self._gradients.pop((stage, batch), {})

    def made_gradients(self, stage: int, batch: int, back: Mapping[CallOutput, Tensor]) -> None:
        """Take the input gradients `back` after the stage's backward, for the previous stage."""
        box, to = (self._back, stage) if (stage - 1, batch) in self._links else (self._gradients, stage - 1)
        if back:
            box[to, batch] = dict(back)

    def send(self, action: Action) -> None:
        """Submit the tensors that the action sends; the communication thread encodes them while this rank computes."""
        box = self._outbox if action.op is Op.SEND_F else self._back
        held = box.pop((action.stage, action.batch), {})
        for lane in self._lanes[action]:
            assert self._under is not None
            value, way = lane.edge.value, lane.passage
            there = action.op is Op.SEND_F
            self._under.submit(lane.job, way.send(held[value]) if there else way.send_gradient(held.get(value)))

    def receive(self, action: Action) -> None:
        """Wait for the tensors that the action receives. Raises PeerLost."""
        found = {lane.edge.value: self._result(lane) for lane in self._lanes[action]}
        box = self._inbox if action.op is Op.RECV_F else self._gradients
        box[action.stage, action.batch] = found

    def finish(self) -> None:
        """Wait until all messages have been sent; raises PeerLost."""
        if self._under is not None:
            self._under.finish()

    def _result(self, lane: TensorSlot) -> Tensor:
        assert self._under is not None
        return self._under.result(lane.job).mean


def _lanes(
    links: StageLinks,
    row: Sequence[Action],
    boundaries: Mapping[int, Mapping[int, StageBoundary]],
    at: tuple[int, int],
) -> dict[Action, list[TensorSlot]]:
    """The lanes of every sending or receiving action, messages numbered in the order in which they begin."""
    passages: dict[tuple[int, int, CallOutput], TensorRoute] = {}
    found: dict[Action, list[TensorSlot]] = {}
    for job, (action, edge) in enumerate(_in_order(row, boundaries)):
        first = action.stage if action.op in (Op.SEND_F, Op.RECV_B) else action.stage - 1  # the stage that made it
        key = (first, action.batch, edge.value)
        if key not in passages:
            passages[key] = way_of(links[first, action.batch], edge.form).passage(edge.form, (*at, action.batch))
        found.setdefault(action, []).append(TensorSlot(edge, passages[key], job))
    for action in row:
        if action.op in _SENDS or action.op in _RECEIVES:
            found.setdefault(action, [])
    return found


def _in_order(
    row: Sequence[Action], boundaries: Mapping[int, Mapping[int, StageBoundary]]
) -> Iterator[tuple[Action, StageTensor]]:
    """As the messages begin. Sends among themselves, and receives, keep the order of the list."""
    computed = 0
    ranked: list[tuple[int, bool, int]] = []
    for place, action in enumerate(row):
        if action.op in _SENDS:
            ranked.append((computed, True, place))
        elif action.op in _RECEIVES:
            ranked.append((max(0, computed - AHEAD), False, place))
        else:
            computed += 1
    for _, _, place in sorted(ranked):
        action = row[place]
        for edge in boundaries[action.batch][action.stage].edges(action.op):
            yield action, edge
