"""Check the exchange and the gradient clipping of a user's own training loop, which has no plan."""

from __future__ import annotations

from gossamer.recipe.conflicts import clipped
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges


def check_loop(
    *, exchange: Exchanges, max_grad_norm: float, key: str = "exchange", clip_key: str = "max_grad_norm"
) -> ParameterRules:
    """Return the exchange of each parameter in a user's own training loop; for `auto`, all-reduce until it is chosen.

    `key` and `clip_key` are named in errors. Raises BadInput for an exchange that excludes clipping, or that needs
    islands, which such a loop does not know.
    """
    exchange = "dense" if exchange == "auto" else exchange
    found = ParameterRules.read(exchange, key=key)
    if found.asks_for_islands:
        raise bad_input(
            wanted="an exchange among ranks that are all alike, as nothing says here which of them share a fast link",
            got="one that speaks of islands",
            do="name the method that is inside it, or train with `gossamer train`",
            key=key,
        )
    if (error := clipped(found.written, max_grad_norm, key=key, clip_key=clip_key)) is not None:
        raise error
    return found
