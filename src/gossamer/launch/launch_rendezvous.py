"""Run one host's workers of a run over several hosts on which the same command was started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from gossamer.launch.local import LaunchRequest, launch_among
from gossamer.launch.rendezvous import meet
from gossamer.launch.rendezvous_config import HostMeeting, RendezvousConfig
from gossamer.launch.supervisor import RunEnd


def launch_met(invitation: RendezvousConfig, start: Callable[[HostMeeting], LaunchRequest]) -> RunEnd:
    """Rendezvous with the other hosts, then run this host's workers and return how the run ended.

    Failures and stop requests on any host reach all hosts within a second. `start` is called once the hosts agree: only
    then the run directory (host 0 names it) and the checkpoint to resume from are known. Raises BadInput (the same
    message on every host) and PeerLost.
    """
    meeting = meet(invitation)
    with ExitStack() as stack:
        for connection in meeting.others.values():
            stack.callback(connection.close)
        if meeting.among.listener is not None:
            stack.callback(meeting.among.listener.close)
        return launch_among(start(meeting), meeting.among, meeting.others)
