"""A teacher for students on other hosts (`gossamer teach`): found as a run finds its own, and served until stopped.

One that no machine holds is served in stages: each process has one, and asks the process of the stage before.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gossamer.job.divided_teacher import AskedStage, DividedTeacher, find_stage
from gossamer.job.found_teacher import find_teacher
from gossamer.job.teacher_facts import digest_of, facts_of
from gossamer.launch.environment import TEACHER_TOKEN
from gossamer.launch.port import listen, parse_address
from gossamer.loss.distillation.teacher_address import address_of
from gossamer.run.remote_teacher.link import Patience, TeacherAbsent
from gossamer.run.remote_teacher.served import ServedTeacher
from gossamer.run.remote_teacher.server import TeacherServer
from gossamer.run.remote_teacher.stage import PlaceBefore, before_link, check_before
from gossamer.spec.errors import bad_input
from gossamer.spec.units import show_bytes

_PATIENCE = Patience(answer_s=60.0, again_s=20.0)  # a student waits longer, so that it learns which stage was lost
_TEACHER, _PREVIOUS = "TEACHER", "--previous"  # arguments of the command
_TURN_S = 0.5
_WAIT_S = 600.0


def serve_teacher(
    teacher: str,
    address: str,
    *,
    token: str = "",
    clients: int = 64,
    stage: str = "",
    previous: str = "",
    cuts: str = "",
    wait_s: float = _WAIT_S,
    tell: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Serve a teacher on HOST:PORT until Ctrl-C or SIGTERM; return what was done.

    token: the shared secret, "" for that of GOSSAMER_TEACHER_TOKEN. stage: I/N for the stage I of N alone, "" for the
    whole teacher; previous: tcp://HOST:PORT of the stage before, which is waited for so long, `wait_s`; cuts: the first
    unit of every stage, separated by commas, "" for stages of equal bytes. Raises BadInput.
    """
    host, port = parse_address(address, key="--listen")
    secret = token or os.environ.get(TEACHER_TOKEN, "")
    if not secret and not _is_here(host):
        raise bad_input(
            wanted=f"a secret, as {host} can be reached from other hosts",
            got="none",
            do=f"set {TEACHER_TOKEN} here and where the student's ranks are, to the same text",
            key="--listen",
        )
    if clients < 1:
        raise bad_input(wanted="1 or more students at a time", got=str(clients), do="give how many", key="--clients")
    asked, before = _asked(stage, previous, cuts)
    listener = listen(host, port)  # a port in use is known before minutes of loading
    with listener, _terminable():
        served = None
        try:
            tell(f"loads {teacher}" if asked is None else f"loads stage {asked.stage} of {asked.stages} of {teacher}")
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            found = _whole(teacher, device) if asked is None else find_stage(teacher, asked, device, key=_TEACHER)
            if isinstance(found, DividedTeacher):
                for remark in found.remarks:
                    tell(remark)
                place = None if before is None else _place_before(before, found, secret, wait_s, tell)
                held = f"{show_bytes(found.held_bytes)} of {show_bytes(found.whole_bytes)}"
                ready = found.served(device, place)
                named = f"{found.part.named}, from {found.cuts.first[found.part.stage - 1]} on, {held}"
            else:
                ready, named = found, f"{found.facts.parameters:,} parameters"
            served = TeacherServer(teacher=ready, listener=listener, token=secret, clients=clients, tell=tell)
            tell(f"{named}, {ready.facts.digest}, at tcp://{host}:{port}; Ctrl-C ends it")
            served.serve()
        except KeyboardInterrupt:
            if served is None:
                raise
        done = served.done
    return {
        "teacher": teacher,
        "address": f"tcp://{host}:{port}",
        "students": done.students,
        "questions": done.questions,
        "tokens": done.tokens,
        "sent_bytes": done.sent_bytes,
        **_told(found),
    }


def _told(found: ServedTeacher | DividedTeacher) -> dict[str, Any]:
    """Return what is reported of a stage."""
    if isinstance(found, ServedTeacher):
        return {}
    part = {"stage": found.part.stage, "stages": found.part.stages}
    return {**part, "held_bytes": found.held_bytes, "whole_bytes": found.whole_bytes}


def _asked(stage: str, previous: str, cuts: str) -> tuple[AskedStage | None, tuple[str, int] | None]:
    """Return the stage that is asked for, and where the one before is. Raises BadInput."""
    if not stage:
        for given, key in ((previous, "--previous"), (cuts, "--cuts")):
            if given:
                raise bad_input(
                    wanted=f"--stage with {key}, which is about a teacher in stages",
                    got="none",
                    do="write which stage this is, such as --stage 1/2, or leave it out to serve a whole teacher",
                    key=key,
                )
        return None, None
    asked = AskedStage.parse(stage, cuts)
    if (asked.stage > 1) != bool(previous):
        raise bad_input(
            wanted=f"the address of stage {asked.stage - 1}, which stage {asked.stage} asks"
            if asked.stage > 1
            else "no address of a stage before the first one",
            got=previous or "none",
            do=f"write --previous tcp://HOST:PORT, where stage {asked.stage - 1} listens"
            if asked.stage > 1
            else "leave it out: it is stage 2 that asks this one",
            key=_PREVIOUS,
        )
    if not previous:
        return asked, None
    at = address_of(previous, key=_PREVIOUS)
    if at is None:
        raise bad_input(
            wanted="tcp://HOST:PORT such as tcp://10.0.0.1:29600",
            got=repr(previous),
            do=f"give the address at which stage {asked.stage - 1} listens",
            key=_PREVIOUS,
        )
    return asked, at


def _whole(teacher: str, device: torch.device) -> ServedTeacher:
    found = find_teacher(teacher, key=_TEACHER)
    return ServedTeacher(found.module, facts_of(found, digest_of(found.module)), device)


def _place_before(
    where: tuple[str, int], found: DividedTeacher, token: str, wait_s: float, tell: Callable[[str], None]
) -> PlaceBefore:
    """Return the place of the stage before, once it answers there. Raises BadInput."""
    part = found.part.model_copy(update={"stage": found.part.stage - 1})
    until_s, said = time.monotonic() + wait_s, ""
    while True:
        try:
            link = before_link(where, part, token=token, patience=_PATIENCE, key=_PREVIOUS)
            break
        except TeacherAbsent:
            if time.monotonic() >= until_s:
                raise
            if not said:
                said = f"waits for {part.named} at {where[0]}:{where[1]}"
                tell(said)
            time.sleep(_TURN_S)
    try:
        check_before(link, found.part, key=_PREVIOUS)
        return PlaceBefore(where, part, link.facts.digest, token, _PATIENCE)
    finally:
        link.close()


def _is_here(host: str) -> bool:
    """Return whether only programs of this machine reach an address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the main thread as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
