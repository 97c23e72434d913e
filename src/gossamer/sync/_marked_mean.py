"""A mean with marks beside it: what ranks have to know of a bucket at the moment in which they know its mean."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from torch import Tensor

from gossamer.comm.message import Message, Outcome, Rounds


def marked(method: Rounds, marks: Tensor) -> Generator[Message, tuple[Tensor, ...], tuple[Outcome, Tensor]]:
    """Run `method`, whose only message is a sum, with `marks` as another part of that message.

    Return its outcome and the sum of the marks over the ranks. The mean is that of `method` alone, bit for bit.
    """
    try:
        message = next(method)
        *reply, total = yield replace(message, parts=(*message.parts, marks))
        try:
            method.send(tuple(reply))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome, total
        raise AssertionError("an exchange of one message has another to send")
    finally:
        method.close()
