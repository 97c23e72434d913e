"""The laws of a loop that is not ours: an exchange and a clipping, and no plan."""

from __future__ import annotations

from gossamer import exchange as exchange_methods
from gossamer.exchange import Exchange, ParameterRules
from gossamer.plan.law._laws import clipped
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges


def check_loop(
    *, exchange: Exchanges, clip: float, key: str = "exchange", clip_key: str = "clip"
) -> ParameterRules[Exchange]:
    """The exchange of one's own loop, by parameter; of one that is still to be chosen, what serves until then. Raises
    BadInput where it cannot be clipped so, or where it speaks of links that such a loop knows nothing of.
    """
    exchange = "dense" if exchange == "auto" else exchange
    found = exchange_methods.rules(exchange, key=key)
    if exchange_methods.asks_for_islands(exchange):
        raise bad_input(
            wanted="an exchange among ranks that are all alike, as nothing says here which of them share a fast link",
            got="one that speaks of islands",
            do="name the method that is inside it, or train with `gossamer train`",
            key=key,
        )
    if (error := clipped(found.written, clip, key=key, clip_key=clip_key)) is not None:
        raise error
    return found
