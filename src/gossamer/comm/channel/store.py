"""The TCPStore of the rendezvous, in which ranks publish their addresses."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from gossamer.comm.patience import GRACE_S, answered


def join_store(
    address: str, port: int, ranks: int, *, is_keeper: bool, timeout_s: float, listener: int = -1
) -> dist.Store:
    """Connect to the TCPStore at `address`:`port`, or host it there where `is_keeper`.

    listener: descriptor of a socket that already listens there, -1 for none (used by the host of the store alone);
    timeout_s: seconds that operations on the store may take. Raises RuntimeError with torch's message.
    """
    handed_over = {"master_listen_fd": listener} if is_keeper and listener >= 0 else {}

    def opened() -> dist.Store:
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

    return answered(opened, timeout_s + GRACE_S, f"the store at {address}:{port}")
