"""The rendezvous on hosts 1 and up: connect to host 0, answer its query, receive ranks and addresses."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

from gossamer.launch.interface import candidates, measure_all, name_of, route_to
from gossamer.launch.local import Among
from gossamer.launch.rendezvous_config import HostMeeting, RendezvousConfig
from gossamer.launch.rendezvous_messages import HostQuery, HostReply, JoinAccepted, JoinRefused, Peer, hello_of
from gossamer.spec.errors import BadInput, PeerLost, WireMismatch

_CONNECT_S = 5.0
_ANSWER_S = 60.0
_RETRY_S = 0.2
_REMIND_S = 10.0


def join(call: RendezvousConfig, stack: ExitStack) -> HostMeeting:
    """Join the rendezvous at host 0 and return the assigned ranks and addresses.

    The connection to host 0 is entered into `stack`. Raises as `meet` does.
    """
    peer = Peer(stack.enter_context(_connect(call)))
    peer.send(hello_of(call.facts, host=call.host, hosts=call.hosts))
    ask = peer.receive(within_s=call.within_s + _CONNECT_S)
    if isinstance(ask, JoinRefused):
        raise BadInput(ask.message)
    if not isinstance(ask, HostQuery):
        raise WireMismatch(f"host 0 at {call.address}:{call.port}: wanted a host query, got the message {ask.kind!r}")
    rundir = call.runs / ask.run
    own = _own_interface(call, peer, ask, rundir)
    welcome = peer.receive(within_s=call.hosts * _ANSWER_S)
    if isinstance(welcome, JoinRefused):
        raise BadInput(welcome.message)
    if not isinstance(welcome, JoinAccepted):
        raise WireMismatch(
            f"host 0 at {call.address}:{call.port}: wanted a join answer, got the message {welcome.kind!r}"
        )
    among = Among(
        host=call.host,
        hostnames=welcome.hostnames,
        offset=welcome.offset,
        ranks=welcome.ranks,
        address=welcome.address,
        port=welcome.port,
        interface=welcome.interface or own or name_of(route_to(welcome.address)),
        resume_step=welcome.resume_step,
        shared=welcome.shared,
    )
    return HostMeeting(among=among, rundir=rundir, others={0: peer.socket})


def _own_interface(call: RendezvousConfig, peer: Peer, ask: HostQuery, rundir: Path) -> str:
    """Answer host 0's question; the name of the only device to choose from, "" when there are several."""
    try:
        own = candidates(call.interface, peer.socket.getpeername()[0])
    except BadInput as error:
        peer.send(HostReply(sees_file=False, rates={}, problem=str(error)))
        return ""
    rates = measure_all(own, ask.ports)
    peer.send(HostReply(sees_file=_sees(rundir / ask.token_file, ask.token), rates=rates))
    return own[0].name if len(own) == 1 else ""


def _sees(file: Path, token: str) -> bool:
    """Whether this host sees the file that host 0 has just written: then they share the run directory."""
    try:
        return file.read_text("ascii") == token
    except (OSError, UnicodeDecodeError):
        return False


def _connect(call: RendezvousConfig) -> socket.socket:
    began_s = reminded_s = time.monotonic()
    where = f"{call.address}:{call.port}"
    while True:
        try:
            return socket.create_connection((call.address, call.port), timeout=_CONNECT_S)
        except OSError as error:
            now_s = time.monotonic()
            if now_s - began_s > call.within_s:
                raise PeerLost(
                    f"host 0 was not reached at {where} within {call.within_s:.0f} s ({error.strerror or error}): "
                    f"start it there with --node-rank 0 --nnodes {call.hosts} and the same --rdzv-endpoint, and check "
                    "that this host can reach that port"
                ) from None
            if now_s - reminded_s > (_REMIND_S if reminded_s > began_s else 1.0):
                call.say(f"waiting for host 0 at {where} ({error.strerror or error})")
                reminded_s = now_s
            time.sleep(_RETRY_S)
