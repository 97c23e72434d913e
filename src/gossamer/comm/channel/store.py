"""The store that all ranks meet in: where each leaves its address for the others."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def join_store(
    address: str, port: int, ranks: int, *, is_keeper: bool, timeout_s: float, listener: int = -1
) -> dist.Store:
    """Reach the store at `address`:`port`, or keep it there: on `listener`, the descriptor of a socket that listens
    there already, where one was handed over. Raises RuntimeError as torch words it.
    """
    handed_over = {"master_listen_fd": listener} if is_keeper and listener >= 0 else {}
    return dist.TCPStore(
        address,
        port,
        ranks,
        is_master=is_keeper,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a process group that somebody opens later at the same address shares it
        **handed_over,
    )
