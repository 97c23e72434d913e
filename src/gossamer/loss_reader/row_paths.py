"""Check that the rows of a batch stay independent up to the loss: then the loss is a mean or sum of per-row values.

A known operation returns the row dimensions of its output (`elementwise`, `views`, `indexing`, `reductions`, `matmul`);
an unknown one keeps the rows if its output has a dimension of the same size. Where the rows are lost, the sizes of all
nodes are checked instead (`by_size`): nothing is refused because it cannot be tracked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.loss_reader import elementwise, indexing, matmul, reductions, views
from gossamer.loss_reader.by_size import across_rows
from gossamer.loss_reader.row_dims import RowsMixed
from gossamer.loss_reader.row_flow import EACH, RowFlow, RowOrigin, RowPath

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LossPath:
    """The result of tracking rows through the graph of a loss. `together`: the first node that mixes rows, "" if there
    is none; `is_one_by_one`: whether rows were selected one by one and their values added. `after`: nodes that reduce
    what was reduced over rows before; `before`: nodes that reduce other dimensions than rows.
    """

    together: str
    is_one_by_one: bool = False
    after: frozenset[Any] = frozenset()
    before: frozenset[Any] = frozenset()
    strangers: int = -1  # hash of data combined with every row, equal on all ranks; 0: none, -1: unknown


def followed(roots: Sequence[Tensor], origin: RowOrigin) -> LossPath:
    """Track all rows from the batch to the losses and return the result."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    flow = RowFlow(origin, _STEPS, _ENTERING)
    try:
        flow.run(nodes)
    except RowsMixed as found:
        return LossPath(str(found))
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:  # an unexpected graph
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
