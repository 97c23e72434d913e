"""Stage links: send tensors from one rank to another, and their gradients back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.message import Collective, ExchangeState, Message, Outcome, ProcessGroups, Rounds, Traffic
from gossamer.comm.random_key import Key, key_at
from gossamer.p2p.activation import ActivationCodec, TensorSpec
from gossamer.p2p.activation.none import NoCompression
from gossamer.spec.errors import WireMismatch, bad_input


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """A link for tensors from rank `source` to rank `target`, used repeatedly. Gradients go in the opposite direction.

    Both ranks are in one group of `level`; its other ranks take no part. (NCCL needs every rank of a group at its first
    message: on GPUs make a level of the two.) `crossing`: codec of the tensors; `name`: distinguishes the tensors
    between two stages.
    """

    source: int
    target: int
    levels: ProcessGroups
    crossing: ActivationCodec = field(default_factory=NoCompression)
    level: str = "all"
    name: str = ""

    def __post_init__(self) -> None:
        group = self.levels.group(self.level, self.source)
        if self.target not in group or self.target == self.source:
            raise bad_input(
                wanted=f"two different ranks in one process group of level {self.level!r}",
                got=f"ranks {self.source} and {self.target}",
                do=f"choose the target of rank {self.source} from {[r for r in group if r != self.source]}",
            )

    def passage(self, form: TensorSpec, at: tuple[int, int, int]) -> TensorRoute:
        """Return the route of one tensor and of its gradient.

        `at` is (seed, step, micro-batch): it keys the random numbers. Raises BadInput where the codec cannot send
        `form`.
        """
        self.crossing.check(form)
        return TensorRoute(self, form, at)

    def traffic(self, form: TensorSpec, rank: int, *, back: bool = False) -> Traffic:
        """Return the traffic of `rank`, one of the two, for one such tensor, or with `back` for its gradient."""
        nbytes = self.crossing.nbytes_back(form) if back else self.crossing.nbytes(form)
        splits, arriving = self._ends(rank, nbytes, back=back)
        return Traffic(Collective.SHUFFLE, sum(splits), 1, self.level, splits, arriving)

    def message(self, payload: Tensor, rank: int, *, back: bool) -> Message:
        """Return the message of `payload`: (1, nbytes) on the rank that sends, (0, nbytes) on the other."""
        return Message((payload,), Collective.SHUFFLE, self.level, *self._ends(rank, 1, back=back))

    def sender(self, *, back: bool) -> int:
        """Return the rank that sends: tensors the source, gradients the target."""
        return self.target if back else self.source

    def _ends(self, rank: int, count: int, *, back: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Splits and arriving of `rank`."""
        other = self.source if rank == self.target else self.target
        ends = tuple(count if r == other else 0 for r in self.levels.group(self.level, rank))
        nothing = (0,) * len(ends)
        return (ends, nothing) if rank == self.sender(back=back) else (nothing, ends)


@dataclass(slots=True)
class TensorRoute:
    """The route of one tensor over a link, and of its gradient back. Each side makes its own, and keeps it in between.

    The four jobs are for the communication thread, each one message. The received tensor is the Outcome's mean;
    floating-point tensors arrive as leaves that require a gradient. A tensor must not be changed before it has been
    sent.
    """

    link: StageLink
    form: TensorSpec
    at: tuple[int, int, int]
    _memory: ExchangeState = field(default_factory=ExchangeState)

    def send(self, x: Tensor) -> Rounds:
        """Send the tensor, on the source."""
        message, self._memory = self.link.crossing.encode(self._fitting(x), self.key(back=False))
        yield self._outgoing(message, back=False)
        return Outcome(message.new_empty(0), None, ExchangeState())

    def receive(self) -> Rounds:
        """Receive the tensor, on the target."""
        (message,) = yield self._incoming(self.link.crossing.nbytes(self.form), back=False)
        x, self._memory = self.link.crossing.decode(message.view(-1), self.form, self.key(back=False))
        return Outcome(x.requires_grad_(self.form.dtype.is_floating_point), None, ExchangeState())

    def send_gradient(self, gradient: Tensor | None) -> Rounds:
        """Send the gradient of the received tensor, on the target.

        None, where nothing depended on the tensor, sends zeros.
        """
        if gradient is None:
            gradient = torch.zeros(self.form.shape, dtype=self.form.dtype, device=self.form.device)
        message = self.link.crossing.encode_back(self._fitting(gradient), self._memory, self.key(back=True))
        self._memory = ExchangeState()
        yield self._outgoing(message, back=True)
        return Outcome(message.new_empty(0), None, ExchangeState())

    def receive_gradient(self) -> Rounds:
        """Receive the gradient of the sent tensor, on the source."""
        (message,) = yield self._incoming(self.link.crossing.nbytes_back(self.form), back=True)
        gradient = self.link.crossing.decode_back(message.view(-1), self.form, self._memory, self.key(back=True))
        self._memory = ExchangeState()
        return Outcome(gradient, None, ExchangeState())

    def through(self, x: Tensor) -> Tensor:
        """Apply both sides of the link to `x` in one process, forward and backward.

        This is the reference for what the link computes.
        """
        through: Tensor = _Through.apply(x, self)  # type: ignore[no-untyped-call]
        return through

    def _outgoing(self, message: Tensor, *, back: bool) -> Message:
        return self.link.message(message.unsqueeze(0), self.link.sender(back=back), back=back)

    def _incoming(self, nbytes: int, *, back: bool) -> Message:
        room = torch.empty((0, nbytes), dtype=torch.uint8, device=self.form.device)
        return self.link.message(room, self.link.sender(back=not back), back=back)

    def _fitting(self, x: Tensor) -> Tensor:
        if TensorSpec.of(x) != self.form:
            raise WireMismatch(
                f"{self.link}: wanted a tensor {self.form}, as the receiver expects, got {TensorSpec.of(x)}: internal "
                "error, please report"
            )
        return x.detach()

    def key(self, *, back: bool) -> Key:
        """Return the random key of one direction."""
        sender = self.link.sender(back=back)
        place = (*self.at, "link", self.link.name, self.link.source, self.link.target, "back" if back else "there")
        return key_at(place, sender)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: TensorRoute) -> Tensor:
        crossing, key = passage.link.crossing, passage.key(back=False)
        message, ctx.sent = crossing.encode(x, key)
        y, ctx.received = crossing.decode(message.clone(), passage.form, key)
        ctx.passage = passage
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        passage: TensorRoute = ctx.passage
        crossing, key = passage.link.crossing, passage.key(back=True)
        message = crossing.encode_back(gradient, ctx.received, key)
        return crossing.decode_back(message.clone(), passage.form, ctx.sent, key), None
