"""Check the exchange and the gradient clipping of a user's own training loop, which has no plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gossamer.exchange import nested
from gossamer.recipe.conflicts import clipped, exchange_told
from gossamer.recipe.parameter_rules import ParameterRules
from gossamer.recipe.plan_methods import ALL_REDUCE, AUTO
from gossamer.spec.errors import bad_input
from gossamer.spec.method_config import Exchanges

_KEY = "exchange"


def check_loop(
    *, exchange: Exchanges, max_grad_norm: float, lossy: bool = False, names: Iterable[Sequence[str]] = ()
) -> None:
    """Check the exchange of a user's own training loop; `auto` is all-reduce until it is chosen.

    `lossy`: whether lossy exchanges are allowed; `names`: those of each model's trained parameters. Raises BadInput for
    an exchange that excludes clipping, needs islands or masks, which such a loop does not know, or has a rule that
    serves no parameter; and for `lossy` beside an exchange that is named, where it has no effect.
    """
    found = ParameterRules.read(ALL_REDUCE if exchange == AUTO else exchange, key=_KEY)
    if lossy and exchange != AUTO:
        raise bad_input(
            wanted="exchange auto, without which lossy has no effect",
            got=f"exchange {exchange_told(exchange)}",
            do="set exchange to auto, or leave lossy out: a named exchange is used even if it is lossy",
            key="lossy",
        )
    if found.asks_for_islands:
        raise bad_input(
            wanted="an exchange without intra-island and inter-island parts, as gossamer.wrap knows no islands",
            got="an exchange with such parts",
            do="pass only its inter-island exchange (inter), or train with `gossamer train`",
            key=_KEY,
        )
    if any(inside.traits.masked for one in found.exchanges for inside in nested(one)):
        raise bad_input(
            wanted="an exchange of all gradients, as the optimizer of your own loop moves all weights",
            got="static_mask",
            do="pass its inner exchange, or train with `gossamer train` and train.optimizer static_mask",
            key=_KEY,
        )
    for some in names:
        found.by_name(some)
    if (error := clipped(found.exchanges, max_grad_norm, key=_KEY, clip_key="max_grad_norm")) is not None:
        raise error
