"""Find out which ranks are lost, where no supervisor does: those that still run report that they lost one."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

WITHIN_S = 3.0  # in which ranks that wait in one message notice, each by its own clock, that it does not come
_LOOK_S = 0.05


def who_is_lost(store: dist.Store, rank: int, group: Sequence[int], *, within_s: float = WITHIN_S) -> str:
    """Report that `rank` lost a peer; return which ranks of `group` have not reported the same within `within_s`.

    The answer is a clause for an error message. A store on a host that is cut off may never answer, so it is asked in a
    thread that is not waited for any longer than that.
    """
    absent: list[list[int]] = []  # what every look has found
    asking = threading.Thread(target=_ask, args=(store, rank, group, within_s, absent), daemon=True)
    asking.start()
    asking.join(within_s + 1.0)
    others = [one for one in group if one != rank]
    if not absent:
        return "the store on rank 0 cannot be reached either: rank 0, or this rank, is cut off"
    lost = absent[-1]
    if not lost:
        return "all of these ranks still run: look at the network between their hosts"
    if lost == others and len(others) > 1:
        return f"none of the other ranks reports the same within {within_s:g} s: this rank may be cut off"
    names = ", ".join(f"rank {one}" for one in lost)
    return f"{names} {'is' if len(lost) == 1 else 'are'} lost: no report of the same came within {within_s:g} s"


def _ask(store: dist.Store, rank: int, group: Sequence[int], within_s: float, absent: list[list[int]]) -> None:
    left, deadline = [one for one in group if one != rank], time.monotonic() + within_s
    try:
        store.set(f"lost a peer/{rank}", "1")
        while True:
            left = [one for one in left if not store.check([f"lost a peer/{one}"])]
            absent.append(left)
            if not left or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_S)
    except RuntimeError:  # rank 0 may have ended: what was found until then holds
        return
