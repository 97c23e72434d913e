"""See the same command on several hosts through to its end, whatever started it there: ssh, or an actor of Ray."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from gossamer.launch.signals import StopRequests
from gossamer.process import BAD_INPUT, DONE, FAILED, INTERRUPTED, EventLoop

_TURN_S = 0.1
_PATIENCE_S = 10.0  # from the end of one host that failed until the others are told to end
_SAVE_S = 700.0  # the same from the end of one that did not: others may still save
_GIVE_UP_S = 200.0  # from then on until a host that has not ended is left alone; its agent kills the command before


class RemoteHost(ABC):
    """The command on one host. `host`: its name, for messages."""

    host: str

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code of the command; None while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the command to save and stop; a second time: to stop at once."""

    @abstractmethod
    def hang_up(self) -> None:
        """Let go of the command: it saves and ends, or ends."""

    @abstractmethod
    def said(self) -> str:
        """Return why the host is lost, where it is, and the end of what a host other than host 0 wrote."""


def see_through(remotes: Sequence[RemoteHost], say: Callable[[str], None]) -> int:
    """Wait for the end of the command on all hosts, forward stop requests, return exit code 0, 2, 3 or 4.

    Once a host has failed, the others have ten seconds to end by themselves, and as long as a save may take once one
    has ended well. A host that does not end then counts as failed. `say` gets what failed where, unless all hosts ended
    alike: then host 0 has said it.
    """
    loop = EventLoop()
    heard, ended_s, failed_s, hung_up_s = 0, 0.0, 0.0, 0.0
    with StopRequests(loop) as requests:
        while any(remote.poll() is None for remote in remotes):
            loop.turn(_TURN_S)
            for _ in range(requests.count - heard):
                for remote in remotes:
                    remote.stop()
            heard = requests.count
            if not failed_s and any(remote.poll() not in (None, DONE, INTERRUPTED) for remote in remotes):
                failed_s = time.monotonic()
            now_s = time.monotonic()
            if not ended_s and any(remote.poll() is not None for remote in remotes):
                ended_s = now_s
            is_due = (failed_s and now_s - failed_s > _PATIENCE_S) or (ended_s and now_s - ended_s > _SAVE_S)
            if is_due and not hung_up_s:
                hung_up_s = now_s
                for remote in remotes:
                    remote.hang_up()
            if hung_up_s and now_s - hung_up_s > _GIVE_UP_S:
                break
    loop.close()
    for remote in remotes:
        if remote.poll() is None:
            say(f"host {remote.host}: it has not ended {_GIVE_UP_S:g} s after it was told to: end the command there")
    codes = [_code(remote) for remote in remotes]
    if len(set(codes)) > 1:  # else host 0 has said it all
        for remote, code in zip(remotes, codes, strict=True):
            if code not in (DONE, INTERRUPTED):
                say(f"host {remote.host}: exit code {code}\n{remote.said()}".strip())
    return _exit_code(codes)


def _code(remote: RemoteHost) -> int:
    code = remote.poll()
    return FAILED if code is None else code


def _exit_code(codes: Sequence[int]) -> int:
    if BAD_INPUT in codes:
        return BAD_INPUT
    if set(codes) <= {DONE, INTERRUPTED}:
        return max(codes)
    return FAILED
