"""Whether the rows of a batch stay apart on the way to a loss: then it is a mean or a sum of what each row makes alone.

A step that is known says where rows are in what it makes (`by_element`, `views`, `picks`, `reductions`, `products`);
one that is not keeps them apart where they can be seen to be in the dimension of before. Where the way is lost, what
the sizes of all steps tell is asked instead: nothing is refused because it cannot be followed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss_reader import elementwise, indexing, matmul, reductions, views
from gossamer.loss_reader.by_size import across_rows
from gossamer.loss_reader.row_dims import RowsTogether
from gossamer.loss_reader.row_flow import EACH, RowFlow, RowOrigin, RowPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossPath:
    """What rows meet with on the way to the losses. `together`: the first step that takes them together, "" where there
    is none; `is_one_by_one`: whether rows were taken out one by one, and what they make was added up. `after`: steps
    that reduce what was reduced over rows before; `before`: those that reduce something else than rows.
    """

    together: str
    is_one_by_one: bool = False
    after: frozenset[Any] = frozenset()
    before: frozenset[Any] = frozenset()
    strangers: int = -1  # 32 bits of what met every row, and must be the same on all ranks; 0: nothing did, -1: unknown


def followed(roots: Sequence[Tensor], origin: RowOrigin) -> LossPath:
    """The way of all rows to the losses."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    flow = RowFlow(origin, _STEPS, _ENTERING)
    try:
        flow.run(nodes)
    except RowsTogether as found:
        return LossPath(str(found))
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:  # a graph nobody thought of
        _log.debug("the rows of a loss cannot be followed: %s: %s", type(error).__name__, error)
        return LossPath(across_rows(roots, origin.rows))
    if flow.is_lost and (name := across_rows(roots, origin.rows)):
        return LossPath(name)
    is_one_by_one = any(flow.places[node] == EACH or flow.places[node].way is RowPath.ROW for node in nodes)
    strangers = -1 if flow.is_lost or origin.rows == 1 else 0
    for label in sorted(flow.strangers & set(flow.parts)):
        strangers = max(0, strangers) * 31 % 2**31 + flow.parts[label] + 1
    return LossPath("", is_one_by_one, frozenset(flow.after), frozenset(flow.before), strangers)


_STEPS = {**elementwise.STEPS, **views.STEPS, **indexing.STEPS, **reductions.STEPS, **matmul.STEPS}
_ENTERING = frozenset((*elementwise.STEPS, *matmul.ENTERING))
