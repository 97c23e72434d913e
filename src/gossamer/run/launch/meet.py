"""Hosts on which the same command was started find each other, check that they agree, and share out the ranks."""

from __future__ import annotations

from contextlib import ExitStack

from gossamer.run.launch.gather import gather
from gossamer.run.launch.invitation import Invitation, Meeting
from gossamer.run.launch.join import join


def meet(invitation: Invitation) -> Meeting:
    """Wait until all hosts are there and agree.

    Raises BadInput, with the same message on every host, when they differ, and PeerLost when one does not come.
    """
    with ExitStack() as stack:
        meeting = gather(invitation, stack) if invitation.host == 0 else join(invitation, stack)
        stack.pop_all()
    return meeting
