"""Keep error feedback around the exchanges of parameters that have a residual to send, so that none is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gossamer import exchange as exchange_methods
from gossamer.comm.channel import Channel, gathered
from gossamer.recipe import PlanMethods
from gossamer.spec.method_config import Exchanges
from gossamer.spec.row_range import whole_of


def owing_under(methods: PlanMethods, params: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the parameters of which the exchange keeps a residual of all rows or of some."""
    kept = (n for n, one in methods.exchange.by_name(params).items() if exchange_methods.has_residual(one))
    return frozenset(name if name in params else whole_of(name) for name in kept)


def owing_anywhere(channel: Channel, params: Mapping[str, Tensor], mine: Iterable[str]) -> frozenset[str]:
    """Return the parameters that are among those of any rank. All ranks must call it together."""
    here = frozenset(mine)
    found = gathered(channel, [float(name in here) for name in params]).max(0).values.tolist() if params else []
    return frozenset(name for name, owes in zip(params, found, strict=True) if owes)


def with_owed(
    written: Exchanges, methods: PlanMethods, params: Mapping[str, Tensor], owing: Iterable[str]
) -> Exchanges:
    """Return `written`, which `methods` have read, with error feedback for the parameters `owing` that it gives none.

    A parameter whose parts have lines of their own is served by these.
    """
    after, owed = methods.exchange.by_name(params), frozenset(owing)
    divided = {whole_of(n) for n in after if n not in params}  # their own line serves none of their rows
    lacking = [
        n
        for n, one in after.items()
        if (n in owed or whole_of(n) in owed) and n not in divided and not exchange_methods.has_residual(one)
    ]
    return exchange_methods.with_error_feedback(written, lacking)
