"""One host's part of a run over several hosts on which the same command was started."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from gossamer.run.launch.invitation import Invitation, Meeting
from gossamer.run.launch.local import Start, launch_among
from gossamer.run.launch.meet import meet
from gossamer.run.launch.supervise import Outcome


def launch_met(invitation: Invitation, start: Callable[[Meeting], Start]) -> Outcome:
    """Meet the other hosts, then run this host's workers; failures and stops on any host reach all within a second.

    `start` is asked once the hosts agree: only then the run's directory (host 0's name for it) and the checkpoint to
    resume from are known. Raises BadInput (the same message on every host) and PeerLost.
    """
    meeting = meet(invitation)
    with ExitStack() as stack:
        for connection in meeting.others.values():
            stack.callback(connection.close)
        if meeting.among.listener is not None:
            stack.callback(meeting.among.listener.close)
        return launch_among(start(meeting), meeting.among, meeting.others)
