"""Rendezvous of hosts on which the same command was started: connect, compare settings, assign ranks."""

from __future__ import annotations

from contextlib import ExitStack

from gossamer.launch.rendezvous_client import join
from gossamer.launch.rendezvous_config import HostMeeting, RendezvousConfig
from gossamer.launch.rendezvous_server import gather


def meet(invitation: RendezvousConfig) -> HostMeeting:
    """Wait until all hosts have joined and agree; return the assigned ranks and addresses.

    Raises BadInput, with the same message on every host, when they differ, and PeerLost when one does not join.
    """
    with ExitStack() as stack:
        meeting = gather(invitation, stack) if invitation.host == 0 else join(invitation, stack)
        stack.pop_all()
    return meeting
