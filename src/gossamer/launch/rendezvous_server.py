"""The rendezvous on host 0: wait for all hosts, compare them, measure bandwidth, assign ranks."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import NoReturn

from gossamer.launch.interface import Interface, RateServer, candidates, choose
from gossamer.launch.local import Among
from gossamer.launch.local import listen as listen_anywhere
from gossamer.launch.port import listen
from gossamer.launch.rendezvous_config import HostMeeting, RendezvousConfig
from gossamer.launch.rendezvous_messages import (
    HostQuery,
    HostReply,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    Peer,
    belongs,
    disagreements,
    hello_of,
    newest_common,
)
from gossamer.spec.errors import BadInput, PeerLost, RunFailed, WireMismatch

_HELLO_S = 5.0
_ANSWER_S = 60.0
_REMIND_S = 10.0


def gather(call: RendezvousConfig, stack: ExitStack) -> HostMeeting:
    """Wait for all hosts to join, compare them and assign ranks; return host 0's own ranks and addresses.

    The connections to the other hosts are entered into `stack`. Raises as `meet` does.
    """
    ours = hello_of(call.facts, host=0, hosts=call.hosts)
    listener = listen(call.address, call.port)
    try:
        arrived = _arrivals(call, ours, listener, stack)
    finally:
        listener.close()
    peers = {host: peer for host, (peer, _) in arrived.items()}
    hellos = [hello for _, hello in arrived.values()]
    if lines := disagreements(ours, hellos):
        _refuse(peers, "the hosts do not agree:\n  " + "\n  ".join(lines) + "\nmake them equal and start again")
    try:
        return _welcome(call, peers, [ours, *hellos], stack)
    except BadInput as error:
        _refuse(peers, str(error))
    except RunFailed as error:
        _tell(peers, str(error))
        raise


def _arrivals(
    call: RendezvousConfig, ours: JoinRequest, listener: socket.socket, stack: ExitStack
) -> dict[int, tuple[Peer, JoinRequest]]:
    arrived: dict[int, tuple[Peer, JoinRequest]] = {}
    began_s = reminded_s = time.monotonic()
    where = f"{call.address}:{call.port}"
    while len(_present(arrived)) < call.hosts - 1:
        missing = ", ".join(str(h) for h in range(1, call.hosts) if h not in arrived)
        now_s = time.monotonic()
        if now_s - began_s > call.within_s:
            lost = f"waited {call.within_s:.0f} s at {where} for host {missing} of {call.hosts}, which did not connect"
            _tell({host: peer for host, (peer, _) in arrived.items()}, lost)
            raise PeerLost(lost)
        if now_s - reminded_s > (_REMIND_S if arrived or reminded_s > began_s else 1.0):
            call.say(f"waiting at {where} for host {missing} of {call.hosts}")
            reminded_s = now_s
        listener.settimeout(0.25)
        try:
            connection = stack.enter_context(listener.accept()[0])
        except TimeoutError:
            continue
        peer = Peer(connection)
        try:
            hello = peer.receive(within_s=_HELLO_S)
            if not isinstance(hello, JoinRequest) or not belongs(hello, ours):
                raise WireMismatch("not one of this run's hosts")
        except (PeerLost, WireMismatch):
            connection.close()  # somebody else's, or a port scan
            continue
        if not 1 <= hello.host < max(call.hosts, hello.hosts) or hello.host in _present(arrived):
            wrong = "another host has that number" if hello.host in (0, *arrived) else f"there are {call.hosts} hosts"
            text = (
                f"{hello.hostname} was started with --node-rank {hello.host}, but {wrong}: give every host a "
                f"--node-rank of its own from 0 to {call.hosts - 1}"
            )
            _refuse({-1: peer, **{h: p for h, (p, _) in arrived.items()}}, text)
        arrived[hello.host] = (peer, hello)
    return dict(sorted(arrived.items()))


def _present(arrived: dict[int, tuple[Peer, JoinRequest]]) -> dict[int, tuple[Peer, JoinRequest]]:
    """Take the hosts away that were ended meanwhile, which may come back, and return what is left."""
    for host in [host for host, (peer, _) in arrived.items() if peer.is_gone]:
        arrived.pop(host)[0].socket.close()
    return arrived


def _welcome(
    call: RendezvousConfig, peers: Mapping[int, Peer], hellos: list[JoinRequest], stack: ExitStack
) -> HostMeeting:
    own = _own_devices(call, peers)
    rundir = call.runs / call.run
    rundir.mkdir(parents=True, exist_ok=True)
    token, token_file = secrets.token_hex(16), rundir / f".meeting-{secrets.token_hex(4)}"
    token_file.write_text(token, "ascii")
    rates = RateServer(device.address for device in own) if len(own) > 1 else None
    answers: dict[int, HostReply] = {}
    try:
        for host, peer in peers.items():  # one after the other: they must not slow each other
            peer.send(
                HostQuery(run=call.run, token_file=token_file.name, token=token, ports=rates.ports if rates else {})
            )
            answers[host] = _answer(peer, hellos[host])
    finally:
        token_file.unlink(missing_ok=True)
        if rates:
            rates.close()
    chosen = choose(own, [answer.rates for answer in answers.values()]) if rates else own[0]
    listener = stack.enter_context(listen_anywhere(chosen.address))
    offsets = [sum(hello.processes for hello in hellos[:host]) for host in range(call.hosts + 1)]
    among = Among(
        host=0,
        hostnames=_distinct([hello.hostname for hello in hellos]),
        offset=0,
        ranks=offsets[-1],
        address=chosen.address,
        port=listener.getsockname()[1],
        listener=listener,
        interface=chosen.name,
        resume_step=newest_common(hellos),
        shared=all(answer.sees_file for answer in answers.values()),
    )
    for host, peer in peers.items():
        peer.send(
            JoinAccepted(
                offset=offsets[host],
                ranks=among.ranks,
                hostnames=among.hostnames,
                address=among.address,
                port=among.port,
                resume_step=among.resume_step,
                shared=among.shared,
                interface=answers[host].rates.get(chosen.address, ("", 0.0))[0],
            )
        )
    return HostMeeting(among=among, rundir=rundir, others={host: peer.socket for host, peer in peers.items()})


def _distinct(names: list[str]) -> tuple[str, ...]:
    """Hosts in containers may all be called the same."""
    return tuple(f"{name}[{host}]" if names.count(name) > 1 else name for host, name in enumerate(names))


def _own_devices(call: RendezvousConfig, peers: Mapping[int, Peer]) -> tuple[Interface, ...]:
    towards = next((peer.socket.getpeername()[0] for peer in peers.values()), call.address)
    return candidates(call.interface, towards)


def _answer(peer: Peer, hello: JoinRequest) -> HostReply:
    try:
        answer = peer.receive(within_s=_ANSWER_S)
    except PeerLost as error:
        raise PeerLost(f"host {hello.host} ({hello.hostname}): {error}") from None
    if not isinstance(answer, HostReply):
        raise WireMismatch(
            f"host {hello.host} ({hello.hostname}): wanted a host reply, got the message {answer.kind!r}"
        )
    if answer.problem:
        raise BadInput(f"host {hello.host} ({hello.hostname}): {answer.problem}")
    return answer


def _refuse(peers: Mapping[int, Peer], message: str) -> NoReturn:
    _tell(peers, message)
    raise BadInput(message)


def _tell(peers: Mapping[int, Peer], message: str) -> None:
    for peer in peers.values():
        with suppress(OSError):
            peer.send(JoinRefused(message=message))
